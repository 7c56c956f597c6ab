"""``miles demo``: train a small model to reverse words on this machine, with ``miles train`` itself.

    words and a random model -> supervised warm-up, until some sampled responses are right
                             -> GRPO on its own trajectories -> the same prompts, before and after

Both runs are ``miles train`` with the flags below.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.core.errors import MilesError
from miles.core.events import Evaluated, Event, StepFinished
from miles.core.types import Group
from miles.launch.build.engines import load_engine
from miles.launch.build.generation import build_generation
from miles.launch.build.models import read_policy
from miles.launch.build.run import build_evaluator
from miles.launch.commands import demo_task
from miles.launch.commands.train import run, summarize_run
from miles.launch.config import Config, DemoOptions
from miles.launch.read_config import read
from miles.launch.runtime.signals import StopSignals, exit_code_from_signal
from miles.observe.factory import build_view
from miles.observe.summary import BeforeAfter, print_summary
from miles.observe.view import NullView, ProgressStage, View
from miles.schedule.checkpoints import CheckpointDirectory

WARMUP_REWARD = 0.33
"""Share of held-out responses that must be right before GRPO begins, which needs successes to reinforce."""

WARMUP_LIMIT = 600
STEPS = {False: 200, True: 260}
"""Enough for every seed tried, dense and (True) with experts."""
NUM_EXAMPLES = 6
THREADS = 1
"""Operations this small gain little from a second core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFolders:
    """The folders of the demo: the initial model and data, and the two runs."""

    root: Path

    @property
    def start(self) -> Path:
        return self.root / "start"

    @property
    def warmup(self) -> Path:
        return self.root / "warmup"

    @property
    def grpo(self) -> Path:
        return self.root / "grpo"


def demo(options: DemoOptions) -> int:
    """Run the demo, or resume one that was interrupted; 128 + the signal when a signal stops it."""
    folders = DemoFolders(root=_find_root(options))
    view = build_view("plain" if options.plain else "auto")
    signals = StopSignals(view.note, view.close)
    began = time.perf_counter()
    try:
        _write_initial_model(folders, options, view)
        warm = _warm_up(folders, options, view, signals)
        if warm is None:
            return _report_interrupted(options, view, signals)
        config, plan, origins = read("train", grpo_flags(folders, options, warm))
        if not run(config, plan, origins, view=view, signals=signals):
            return _report_interrupted(options, view, signals)
        examples = _compare_responses(config, warm, _find_newest_checkpoint(folders.grpo), view)
    finally:
        view.close()
    summary = summarize_run(
        folders.grpo,
        commands=_list_next_commands(folders, options),
        examples=examples,
        wall_seconds=time.perf_counter() - began,
    )
    print_summary(summary, sys.stdout, plain=options.plain)
    return 0


COMMON_FLAGS = (
    "--input-key input --label-key label --apply-chat-template --rm-type exact --rollout-shuffle --adam-beta2 0.95 "
    "--weight-decay 0"
)
WARMUP_FLAGS = (
    "--loss-type sft_loss --calculate-per-token-loss --rollout-batch-size 64 --lr 3e-3 --lr-warmup-iters 20 "
    "--eval-interval 5 --n-samples-per-eval-prompt 4 --skip-eval-before-train --disable-save-rollouts"
)
GRPO_FLAGS = (
    "--advantage-estimator grpo --rollout-batch-size 32 --n-samples-per-prompt 8 --lr 1e-3 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.05 --save-interval 50 --eval-interval 20 --n-samples-per-eval-prompt 4 --share-prefix"
)


def common_flags(folders: DemoFolders, options: DemoOptions) -> list[str]:
    """The flags of both runs."""
    values = {
        "--rollout-max-response-len": demo_task.Task().longest + 3,
        "--rollout-seed": options.seed,
        "--seed": options.seed,
        "--device": options.device,
        "--num-threads": options.num_threads or THREADS,
        "--parity": options.parity,
    }
    heldout = ["--eval-prompt-data", "heldout", str(folders.start / "heldout.jsonl")]
    return [*COMMON_FLAGS.split(), *heldout, *_list_words(values)]


def warmup_flags(folders: DemoFolders, options: DemoOptions) -> list[str]:
    """Supervised fine-tuning on demonstrations, evaluated like GRPO."""
    values = {
        "--hf-checkpoint": folders.start,
        "--save": folders.warmup,
        "--prompt-data": folders.start / "warmup.jsonl",
        "--num-rollout": WARMUP_LIMIT,
    }
    return [*WARMUP_FLAGS.split(), *_list_words(values), *common_flags(folders, options)]


def grpo_flags(folders: DemoFolders, options: DemoOptions, warm: Path) -> list[str]:
    """Reinforcement learning on the model's own trajectories."""
    values = {
        "--hf-checkpoint": warm,
        "--save": folders.grpo,
        "--prompt-data": folders.start / "train.jsonl",
        "--num-rollout": _count_steps(options),
    }
    replay = ["--use-rollout-routing-replay"] if options.moe else []
    return [*GRPO_FLAGS.split(), *_list_words(values), *replay, *common_flags(folders, options)]


def _list_words(values: Mapping[str, object]) -> list[str]:
    return [word for flag, value in values.items() for word in (flag, str(value))]


def _count_steps(options: DemoOptions) -> int:
    return options.steps or STEPS[options.moe]


def _find_root(options: DemoOptions) -> Path:
    """The folder of --save, else the first runs/demo… without a finished demo."""
    if options.save is not None:
        return Path(options.save)
    base, number = f"demo{'-moe' if options.moe else ''}", 1
    while (root := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        if _read_marker(root) == _describe_options(options) and not _is_finished(DemoFolders(root=root), options):
            break
        number += 1
    return root


def _is_finished(folders: DemoFolders, options: DemoOptions) -> bool:
    newest = CheckpointDirectory(folders.grpo / "checkpoints").latest()
    return newest is not None and newest[1].step >= _count_steps(options)


def _read_marker(root: Path) -> dict[str, object] | None:
    path = root / "demo.json"
    return json.loads(path.read_text()) if path.exists() else None


def _describe_options(options: DemoOptions) -> dict[str, object]:
    described: dict[str, object] = {
        "moe": options.moe,
        "seed": options.seed,
        "steps": _count_steps(options),
        "device": options.device,
    }
    return described | ({"parity": options.parity} if options.parity != "fast" else {})


def _write_initial_model(folders: DemoFolders, options: DemoOptions, view: View) -> None:
    if _read_marker(folders.root) is not None:
        return
    with view.stage("Creating words and a random model", total=2) as advance:
        folders.start.mkdir(parents=True, exist_ok=True)
        demo_task.write_task(folders.start, demo_task.Task(), options.seed)
        advance(1)
        demo_task.write_checkpoint(folders.start, moe=options.moe, seed=options.seed)
        advance(1)
        (folders.root / "demo.json").write_text(json.dumps(_describe_options(options)))


def _warm_up(folders: DemoFolders, options: DemoOptions, view: View, signals: StopSignals) -> Path | None:
    """Train on demonstrations until enough responses are right; the checkpoint, or None when interrupted first."""
    passed = folders.warmup / "passed.json"
    if not passed.exists():
        config, plan, origins = read("train", warmup_flags(folders, options))
        condition = _WarmUpCondition()
        with view.stage("Warm-up on demonstrations", total=None) as stage:
            finished = run(config, plan, origins, view=_WarmUpView(stage), stop_when=condition, signals=signals)
        if condition.reward is None and finished:
            raise MilesError(
                f"{WARMUP_LIMIT} steps of warm-up did not bring the held-out reward to {WARMUP_REWARD}; "
                "try another --seed"
            )
        if condition.reward is None:
            return None
        passed.write_text(json.dumps({"heldout": condition.reward}))
    return _find_newest_checkpoint(folders.warmup)


class _WarmUpCondition:
    """True once the held-out reward is high enough."""

    def __init__(self) -> None:
        self.reward: float | None = None

    def __call__(self, event: Event) -> bool:
        if isinstance(event, Evaluated) and event.metrics["eval/heldout/reward"] >= WARMUP_REWARD:
            self.reward = event.metrics["eval/heldout/reward"]
        return self.reward is not None


class _WarmUpView(NullView):
    """Shows a whole run as one progress bar."""

    def __init__(self, stage: ProgressStage) -> None:
        self._stage = stage
        self._reward = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self._reward = event.metrics["eval/heldout/reward"]
        if isinstance(event, StepFinished):
            self._stage(
                1, f"step {event.step}, loss {event.metrics['loss']:.2f}, reward {self._reward:.2f} of {WARMUP_REWARD}"
            )


def _compare_responses(config: Config, before: Path, after: Path, view: View) -> list[BeforeAfter]:
    with view.stage("Generating for the same words, before and after"):
        old_groups, new_groups = (asyncio.run(_generate_examples(config, folder)) for folder in (before, after))
    return [
        BeforeAfter(
            prompt=old.prompt.messages[-1]["content"],
            before=old.trajectories[0].metadata["text"],
            after=new.trajectories[0].metadata["text"],
            reward_before=old.rewards[0],
            reward_after=new.rewards[0],
        )
        for old, new in zip(old_groups, new_groups, strict=True)
    ]


async def _generate_examples(config: Config, folder: Path) -> list[Group]:
    """Responses to a few held-out words, sampled at temperature 1 from the checkpoint in ``folder``."""
    name, path = config.rollout.eval_prompt_data
    data = ["--eval-prompt-data", name, f"{path}@[0:{NUM_EXAMPLES}]", "--n-samples-per-eval-prompt", "1"]
    shared = ["--label-key", "label", "--apply-chat-template", "--rm-type", "exact"]
    length = ["--rollout-max-response-len", str(config.rollout.rollout_max_response_len)]
    model = ["--hf-checkpoint", str(folder), "--device", config.cluster.device, "--parity", config.models.parity]
    eval_config, _, _ = read("eval", [*model, *data, *shared, *length])
    policy = read_policy(eval_config)
    engine = await load_engine(eval_config, policy)
    evaluator, _ = build_evaluator(eval_config, build_generation(eval_config, policy), engine)
    assert evaluator is not None
    groups = (await evaluator.groups())[name]
    await engine.close()
    return groups


def _find_newest_checkpoint(run_directory: Path) -> Path:
    found = CheckpointDirectory(run_directory / "checkpoints").latest()
    assert found is not None, "the run has just been saved"
    return found[0]


def _report_interrupted(options: DemoOptions, view: View, signals: StopSignals) -> int:
    values = {"--seed": options.seed or None, "--steps": options.steps, "--save": options.save}
    values["--parity"] = options.parity if options.parity != "fast" else None
    values["--device"] = options.device if options.device != "auto" else None
    flags = [f" {flag} {value}" for flag, value in values.items() if value is not None]
    command = "miles demo" + (" --moe" if options.moe else "") + "".join(flags)
    view.note(f"Stopped early and saved; the same command resumes the demo: {command}")
    return exit_code_from_signal(signals.received or signal.SIGINT)


def _list_next_commands(folders: DemoFolders, options: DemoOptions) -> list[tuple[str, str]]:
    commands = [
        (f"miles chat {folders.grpo}", "type a word, read it reversed"),
        (f"miles plan {folders.grpo / 'config.toml'}", "every option of this run and its origin"),
    ]
    return commands if options.moe else [*commands, ("miles demo --moe", "the same with a mixture of experts")]
