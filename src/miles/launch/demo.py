"""``miles demo``: a small language model learns to reverse words while you watch, through the real program.

    words and a random model -> supervised warm-up, until sampled answers are now and then right
                             -> GRPO on its own attempts -> the same questions, before and after

Both runs are ``miles train`` with the flags below; nothing here is made for show.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from miles.core.errors import MilesError
from miles.core.events import Evaluated, Event, StepFinished
from miles.core.types import Group
from miles.launch import demo_task
from miles.launch.answering import answering_of
from miles.launch.config import Config, DemoOptions
from miles.launch.engines import lone_engine
from miles.launch.main import read
from miles.launch.policy import read_policy
from miles.launch.run import closing, run
from miles.launch.wire import evaluator_of
from miles.observe.summary import Turn, print_summary
from miles.observe.view import Silent, Stage, View, make_view
from miles.schedule.recover import Checkpoints

GATE = 0.33
"""Share of sampled held-out answers that must be right before GRPO begins: successes it can reinforce."""

WARMUP_LIMIT = 600
STEPS = {False: 200, True: 260}
"""Known to be enough with every seed tried, dense and (True) with experts."""
SHOWN = 6
THREADS = 1
"""Operations this small gain little from a second core, and lose much when somebody else uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the demo keeps things: what it starts from, and the two runs."""

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
    """Run the demo, or go on with one that was interrupted; 130 when interrupted again."""
    places = Places(root=_free_root(options))
    view = make_view("plain" if options.plain else "auto")
    began = time.perf_counter()
    try:
        _write_start(places, options, view)
        warm = _warm_up(places, options, view)
        if warm is None:
            return _interrupted(options, view)
        config, plan, origins = read("train", grpo_flags(places, options, warm))
        if not run(config, plan, origins, view=view):
            return _interrupted(options, view)
        turns = _before_and_after(config, warm, _newest(places.grpo), view)
    finally:
        view.close()
    summary = closing(
        places.grpo, commands=_next(places, options), turns=turns, wall_seconds=time.perf_counter() - began
    )
    print_summary(summary, sys.stdout)
    return 0


def common_flags(places: Places, options: DemoOptions) -> list[str]:
    """What both runs share."""
    return [
        *("--input-key", "input", "--label-key", "label", "--apply-chat-template", "--rm-type", "exact"),
        *("--eval-prompt-data", "heldout", str(places.start / "heldout.jsonl")),
        *("--rollout-max-response-len", str(demo_task.Task().longest + 3), "--rollout-shuffle"),
        *("--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--rollout-seed", str(options.seed), "--seed", str(options.seed), "--device", options.device),
        *("--num-threads", str(options.num_threads or THREADS), "--parity", options.parity),
    ]


def warmup_flags(places: Places, options: DemoOptions) -> list[str]:
    """Supervised fine-tuning on demonstrations, judged as GRPO will be."""
    return [
        *("--hf-checkpoint", str(places.start), "--save", str(places.warmup), "--loss-type", "sft_loss"),
        *("--prompt-data", str(places.start / "warmup.jsonl"), "--rollout-batch-size", "64"),
        *("--num-rollout", str(WARMUP_LIMIT), "--lr", "3e-3", "--lr-warmup-iters", "20", "--calculate-per-token-loss"),
        *("--eval-interval", "5", "--n-samples-per-eval-prompt", "4", "--skip-eval-before-train"),
        "--disable-save-rollouts",
        *common_flags(places, options),
    ]


def grpo_flags(places: Places, options: DemoOptions, warm: Path) -> list[str]:
    """Reinforcement learning on the model's own attempts."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(places.grpo), "--advantage-estimator", "grpo"),
        *("--prompt-data", str(places.start / "train.jsonl"), "--rollout-batch-size", "32"),
        *("--n-samples-per-prompt", "8", "--num-rollout", str(_steps(options))),
        *("--lr", "1e-3", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.05", "--save-interval", "50"),
        *("--eval-interval", "20", "--n-samples-per-eval-prompt", "4"),
        *(["--use-rollout-routing-replay"] if options.moe else []),
        *common_flags(places, options),
    ]


def _steps(options: DemoOptions) -> int:
    return options.steps or STEPS[options.moe]


def _free_root(options: DemoOptions) -> Path:
    """The folder asked for; else the first runs/demo… that holds no finished demo."""
    if options.save is not None:
        return Path(options.save)
    base, number = f"demo{'-moe' if options.moe else ''}", 1
    while (root := Path("runs") / (base if number == 1 else f"{base}-{number}")).exists():
        if _marker(root) == _options_of(options) and not _is_finished(Places(root=root), options):
            break
        number += 1
    return root


def _is_finished(places: Places, options: DemoOptions) -> bool:
    newest = Checkpoints(places.grpo / "checkpoints").latest()
    return newest is not None and newest[1].step >= _steps(options)


def _marker(root: Path) -> dict[str, object] | None:
    path = root / "demo.json"
    return json.loads(path.read_text()) if path.exists() else None


def _options_of(options: DemoOptions) -> dict[str, object]:
    told: dict[str, object] = {
        "moe": options.moe,
        "seed": options.seed,
        "steps": _steps(options),
        "device": options.device,
    }
    return told | ({"parity": options.parity} if options.parity != "fast" else {})


def _write_start(places: Places, options: DemoOptions, view: View) -> None:
    if _marker(places.root) is not None:
        return
    with view.stage("Making words and a random model", total=2) as advance:
        places.start.mkdir(parents=True, exist_ok=True)
        demo_task.write_task(places.start, demo_task.Task(), options.seed)
        advance(1)
        demo_task.write_checkpoint(places.start, moe=options.moe, seed=options.seed)
        advance(1)
        (places.root / "demo.json").write_text(json.dumps(_options_of(options)))


def _warm_up(places: Places, options: DemoOptions, view: View) -> Path | None:
    """Train on demonstrations until the gate is passed; the checkpoint, or None when interrupted first."""
    passed = places.warmup / "passed.json"
    if not passed.exists():
        config, plan, origins = read("train", warmup_flags(places, options))
        gate = _Gate()
        with view.stage("Warm-up on demonstrations", total=None) as stage:
            finished = run(config, plan, origins, view=_WarmUpView(stage), watch=gate)
        if gate.reached is None and finished:
            raise MilesError(
                f"{WARMUP_LIMIT} steps of warm-up did not bring held-out answers to {GATE}; try another --seed"
            )
        if gate.reached is None:
            return None
        passed.write_text(json.dumps({"heldout": gate.reached}))
    return _newest(places.warmup)


class _Gate:
    """Open once answers are right often enough."""

    def __init__(self) -> None:
        self.reached: float | None = None

    def __call__(self, event: Event) -> bool:
        if isinstance(event, Evaluated) and event.metrics["eval/heldout/reward"] >= GATE:
            self.reached = event.metrics["eval/heldout/reward"]
        return self.reached is not None


class _WarmUpView(Silent):
    """Shows a whole run as one bar."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._right = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self._right = event.metrics["eval/heldout/reward"]
        if isinstance(event, StepFinished):
            self._stage(1, f"step {event.step}, loss {event.metrics['loss']:.2f}, right {self._right:.2f} of {GATE}")


def _before_and_after(config: Config, before: Path, after: Path, view: View) -> list[Turn]:
    with view.stage("Asking the same words, before and after"):
        was, now = (asyncio.run(_answers(config, folder)) for folder in (before, after))
    return [
        Turn(
            prompt=old.prompt.messages[-1]["content"],
            before=old.trajectories[0].metadata["text"],
            after=new.trajectories[0].metadata["text"],
            reward_before=old.rewards[0],
            reward_after=new.rewards[0],
        )
        for old, new in zip(was, now, strict=True)
    ]


async def _answers(config: Config, folder: Path) -> list[Group]:
    """A few held-out words, answered at temperature 1 by the checkpoint in ``folder``."""
    name, path = config.rollout.eval_prompt_data
    few = ["--eval-prompt-data", name, f"{path}@[0:{SHOWN}]", "--n-samples-per-eval-prompt", "1"]
    shared = ["--label-key", "label", "--apply-chat-template", "--rm-type", "exact"]
    length = ["--rollout-max-response-len", str(config.rollout.rollout_max_response_len)]
    same = ["--parity", config.models.parity]
    asked, _, _ = read(
        "eval", ["--hf-checkpoint", str(folder), "--device", config.cluster.device, *few, *shared, *length, *same]
    )
    policy = read_policy(asked)
    engine = await lone_engine(asked, policy)
    evaluator, _ = evaluator_of(asked, answering_of(asked, policy), engine)
    assert evaluator is not None
    groups = (await evaluator.groups())[name]
    await engine.close()
    return groups


def _newest(run_directory: Path) -> Path:
    found = Checkpoints(run_directory / "checkpoints").latest()
    assert found is not None, "the run has just been saved"
    return found[0]


def _interrupted(options: DemoOptions, view: View) -> int:
    given = {"--seed": options.seed or None, "--steps": options.steps, "--save": options.save}
    given["--parity"] = options.parity if options.parity != "fast" else None
    given["--device"] = options.device if options.device != "auto" else None
    flags = [f" {flag} {value}" for flag, value in given.items() if value is not None]
    again = "miles demo" + (" --moe" if options.moe else "") + "".join(flags)
    view.note(f"Stopped early and saved; the same command goes on from there: {again}")
    return 130


def _next(places: Places, options: DemoOptions) -> list[tuple[str, str]]:
    commands = [
        (f"miles chat {places.grpo}", "type a word, read it reversed"),
        (f"miles plan {places.grpo / 'config.toml'}", "every knob of this run, and who set it"),
    ]
    return commands if options.moe else [*commands, ("miles demo --moe", "the same with a mixture of experts")]
