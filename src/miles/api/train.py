"""``miles.train``: one training run from Python, with rows, functions and options by name.

    caller's thread   reads the options -> starts the run -> waits; an interrupt stops the run after its step
    run's thread      miles.launch.commands.train.run, with an event loop of its own

The run has its own thread, so that a notebook, whose thread has a running event loop, and a script call it alike.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from miles.api.functions import adapt_reward, register_function
from miles.api.loop_thread import wait_for
from miles.api.options import build_argv, list_algorithm_options
from miles.api.records import FOLDER, Data, RecordIndex, list_columns, list_rows, storing_rows
from miles.api.result import TrainResult
from miles.config.provenance import Origins
from miles.core.errors import UsageError
from miles.hooks.import_path import is_path
from miles.launch.config import Config
from miles.launch.plan.plan import Plan, choose_parity_tolerance, choose_run_dir
from miles.launch.read_config import read, read_partially
from miles.launch.runtime.signals import StopSignals
from miles.observe.factory import build_view
from miles.rollout.config import RolloutConfig

RewardArgument = Callable[..., Any] | str
"""A function, the name of a built-in reward, or the address of a function."""


def train(
    model: str | PurePath,
    data: Data | None = None,
    reward: RewardArgument | None = None,
    algorithm: str = "grpo",
    steps: int | None = None,
    **options: Any,
) -> TrainResult:
    """Train ``model`` and return what the run has made.

    ``model`` is the folder of a Hugging Face checkpoint or its name on the hub. ``data`` are rows (dictionaries, or
    texts), an iterable of rows, or a path as ``--prompt-data`` takes it; of an iterable without a length, as many rows
    are read as ``steps`` need. ``reward`` is a function of any of ``response``, ``label``, ``record``, ``prompt`` and
    ``trajectory``, plain or async, that returns a number or a ``miles.Reward``; or the name of a built-in reward.
    ``algorithm`` is a value of ``--advantage-estimator``, or ``sft``, ``dpo`` or ``reward_model``. ``options`` are the
    flags of ``miles train`` with underscores, ``miles train --help all`` lists them; a hook may be a function.

    Without ``save=`` the run gets a new directory under ``runs/``; the same call with the same ``save=`` resumes it.
    An interrupt (Ctrl-C, or the stop button of a notebook) ends the run after its current step, saved; a second one
    does not wait for that. UsageError has everything that is wrong with the options.

    >>> keys = {"input_key": "question", "label_key": "answer"}
    >>> result = miles.train("Qwen/Qwen3-0.6B", rows, grade, steps=100, lr=1e-6, **keys)  # doctest: +SKIP
    """
    run = _RunningTraining(_read_run(model, data, reward, algorithm, steps, options))
    try:
        return wait_for(run.future)
    except KeyboardInterrupt:
        run.stop()
        return wait_for(run.future)


async def train_async(
    model: str | PurePath,
    data: Data | None = None,
    reward: RewardArgument | None = None,
    algorithm: str = "grpo",
    steps: int | None = None,
    **options: Any,
) -> TrainResult:
    """``miles.train`` for a program with an event loop, which goes on meanwhile.

    Cancelling it stops the run after its current step and waits for that; cancelling it again does not wait.
    """
    prepare = partial(_read_run, model, data, reward, algorithm, steps, options)
    run = _RunningTraining(await asyncio.to_thread(prepare))
    ended = asyncio.wrap_future(run.future)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        run.stop()
        await asyncio.wait((ended,))
        raise


# -- options --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RunOptions:
    config: Config
    plan: Plan
    origins: Origins


def _read_run(
    model: str | PurePath,
    data: Data | None,
    reward: RewardArgument | None,
    algorithm: str,
    steps: int | None,
    options: Mapping[str, Any],
) -> _RunOptions:
    """Read all options as ``miles train`` does, with rows in memory written to the run's directory."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings would cut into what is printed
    given: dict[str, Any] = {"hf_checkpoint": model, **list_algorithm_options(algorithm)}
    if steps is not None:
        given["num_rollout"] = steps
    named = _merge(given, options)
    known = read_partially(build_argv(named))
    if options.get("save") is None:
        named["save"] = _choose_new_directory(choose_run_dir(known))
    rows = None
    if isinstance(data, str | PurePath):
        named = _merge({"prompt_data": [data]}, named)
    elif data is not None:
        rows = list_rows(data, known.rollout.input_key, _count_rows(known))
    records = RecordIndex(rows)
    if reward is not None:
        named = _merge(_name_reward(reward, known.rollout, records), named)
    if known.fault_tolerance.max_restarts:
        raise UsageError("max_restarts starts the command line again after a crash; use miles train for it.")
    if rows is None:
        run = _RunOptions(*read("train", build_argv(named)))
    else:
        with storing_rows(rows, Path(named["save"]) / FOLDER, list_columns(known)) as path:
            run = _RunOptions(*read("train", build_argv(_merge({"prompt_data": [path]}, named))))
    records.set_entries(run.config.rollout.prompt_data, run.plan.eval_sets)
    return run


def _merge(given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the parameters and those by name; UsageError if both set one."""
    twice = [name for name in given if name in options]
    if twice:
        raise UsageError(f"{twice[0]} is set by a parameter of miles.train already; give it once.")
    return {**given, **options}


def _choose_new_directory(base: Path) -> Path:
    """A directory that no run has yet."""
    number = 1
    while (found := base if number == 1 else base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return found


def _count_rows(config: Config) -> int | None:
    """How many prompts the steps need; None if the length of the run depends on their number."""
    steps = config.schedule.num_rollout
    return None if steps is None else steps * config.rollout.rollout_batch_size


def _name_reward(reward: RewardArgument, rollout: RolloutConfig, records: RecordIndex) -> dict[str, Any]:
    """The option that names the reward; a function gets an address in this process."""
    if isinstance(reward, str):
        return {"custom_rm_path" if is_path(reward) else "rm_type": reward}
    if rollout.reward_num_workers:
        raise UsageError(
            "reward is a function of this process, which the workers of reward_num_workers cannot call; put it into a "
            "module and name it package.module:name."
        )
    if rollout.group_rm:
        return {"custom_rm_path": register_function(reward, default_name="reward")}
    adapted = adapt_reward(reward, records)
    return {"custom_rm_path": register_function(adapted, default_name="reward")}


# -- the run --------------------------------------------------------------------------------


class _RunningTraining:
    """A run in a thread of its own; ``future`` has its result."""

    def __init__(self, options: _RunOptions) -> None:
        self.future: Future[TrainResult] = Future()
        self.future.set_running_or_notify_cancel()  # it is stopped, not cancelled
        self._options = options
        config = options.config
        self._view = build_view(config.observe.view, parity_tolerance=choose_parity_tolerance(config))
        self._signals = StopSignals(self._view.note)
        threading.Thread(target=self._run, name="miles.train", daemon=True).start()

    def stop(self) -> None:
        """End the run after its current step."""
        self._view.note("Stopping: this step is finished and saved first (a second interrupt does not wait for it).")
        self._signals.stop()

    def _run(self) -> None:
        # Imports torch, which takes seconds: errors in options are reported before.
        from miles.launch.commands.train import run

        options = self._options
        try:
            finished = run(options.config, options.plan, options.origins, view=self._view, signals=self._signals)
            if finished and options.config.hub.push_to_hub is not None:
                self._upload()
            self.future.set_result(TrainResult(directory=options.plan.run_dir, finished=finished))
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            self._view.close()

    def _upload(self) -> None:
        from miles.launch.hub.upload import push_to_hub
        from miles.launch.rules.model import HUB_TOKEN

        options = self._options
        self._view.note(f"Uploaded to {push_to_hub(options.config, options.plan.run_dir, os.environ[HUB_TOKEN])}")
