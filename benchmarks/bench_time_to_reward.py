"""Wall seconds until a real model's reward reaches a bar, with Miles and with TRL's GRPOTrainer, on one GPU in one run.

    PYTHONPATH=src:. python benchmarks/bench_time_to_reward.py MODEL [--bar 0.35] [--max-steps 120]
        [--sides miles trl trl:static] [-- FLAGS OF MILES TRAIN]

Both start from the checkpoint MODEL (made for SmolLM2-135M-Instruct) and make the same kind of step: 64 prompts x 8
responses of up to 64 tokens at temperature 1, one AdamW update in bf16, group-relative advantages, the same prompts in
the same order. A prompt is a sum or a difference of numbers up to 60, and the reward is 1 if the last integer of a
response is the answer. No prompt comes twice, so a step's mean reward is that of prompts the policy was not trained on;
the bar is on the mean of five steps. Time counts from the start of the process: imports, weights, kernels and graphs
are in it. Miles runs ``miles train`` with its parity check, digests, rollout files and metrics; TRL generates with
transformers, the whole batch at once, without gradient checkpointing, and writes nothing; with ``trl:static`` into a
static KV cache, for which transformers compiles the decode step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 64, 8, 64
LEARNING_RATE, WARMUP_STEPS, WINDOW = 1e-5, 5, 5
STEP_LINE, PART_LINE = "STEP ", "PART "
Curve = list[tuple[float, float]]


def write_prompts(model: Path, path: Path) -> None:
    """All sums and differences in random order, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    pairs = [(a, b, sign) for a in range(61) for b in range(61) for sign in "+-"]
    random.Random(0).shuffle(pairs)
    with path.open("w") as out:
        for a, b, sign in pairs:
            chat = [{"role": "user", "content": f"What is {a} {sign} {b}? Reply with the number."}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            out.write(json.dumps({"input": text, "label": str(a + b if sign == "+" else a - b)}) + "\n")


def last_integer(text: str) -> str | None:
    return (re.findall(r"-?\d+", text) or [None])[-1]


def has_reached(curve: Curve, bar: float) -> bool:
    """Whether the mean of the last steps is at the bar."""
    return len(curve) >= WINDOW and sum(reward for _, reward in curve[-WINDOW:]) / WINDOW >= bar


def add_step(curve: Curve, reward: float) -> None:
    """Note a step that has ended, also for the parent process."""
    curve.append((time.monotonic() - STARTED, reward))
    print(STEP_LINE, json.dumps(curve[-1]), flush=True)


def run_miles(model: Path, prompts: Path, steps: int, bar: float, work: Path, more: Sequence[str] = ()) -> None:
    """Train with ``miles train`` until the bar."""
    from miles.core.events import Event, StepFinished
    from miles.launch.precompile.process import start_precompilation
    from miles.launch.read_config import read

    curve: Curve = []

    def stop_when(event: Event) -> bool:
        if isinstance(event, StepFinished):
            add_step(curve, event.metrics["reward"])
        return has_reached(curve, bar)

    flags = {
        "--hf-checkpoint": model,
        "--prompt-data": prompts,
        "--input-key": "input",
        "--label-key": "label",
        "--rm-type": "last_int",
        "--rollout-batch-size": NUM_PROMPTS,
        "--n-samples-per-prompt": NUM_SAMPLES,
        "--rollout-max-response-len": MAX_TOKENS,
        "--num-rollout": steps,
        "--lr": LEARNING_RATE,
        "--lr-warmup-iters": WARMUP_STEPS,
        "--dtype": "bfloat16",
        "--save-interval": steps,
        "--save": work,
        "--view": "plain",
    }
    config, plan, origins = read("train", [*(str(word) for pair in flags.items() for word in pair), *more])
    precompilation = start_precompilation(config)
    from miles.launch.commands.train import run
    from miles.observe.view import NullView

    run(config, plan, origins, view=NullView(), stop_when=stop_when, precompilation=precompilation)
    print_parts(work / "timings.jsonl")


def print_parts(timings: Path) -> None:
    """The parts of a step that take at least 10 ms, and the phases of the start, in seconds."""
    steps = [row["seconds"] for row in map(json.loads, timings.read_text().splitlines()) if row["kind"] == "train"]
    for name in sorted(steps[0].keys() | steps[-1].keys()):
        seconds = statistics.median(step[name] for step in steps if name in step)
        if seconds >= 0.01 and not name.startswith(("limit/", "perf/")):
            print(PART_LINE, f"{name:44} {seconds:8.3f}", flush=True)


def run_trl(model: Path, prompts: Path, steps: int, bar: float, work: Path, cache: str | None = None) -> None:
    """The same with TRL, which generates into a ``cache`` of that implementation."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    curve: Curve = []
    rewards: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
            add_step(curve, rewards[-1])
            if has_reached(curve, bar):
                control.should_training_stop = True

    def reward(completions: list[str], label: list[str], **values: Any) -> list[float]:
        found = [float(last_integer(text) == right) for text, right in zip(completions, label, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    settings = GRPOConfig(
        output_dir=str(work),
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=MAX_TOKENS,
        cache_implementation=cache,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS,
        weight_decay=0.0,
        max_steps=steps,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": row["input"], "label": row["label"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        callbacks=[Watch()],
    )
    trainer.train()


SIDES: Mapping[str, Callable[[Path, Path, int, float, Path], None]] = {
    "miles": run_miles,
    "trl": run_trl,
    "trl:static": partial(run_trl, cache="static"),
}


def measure_side(side: str, args: argparse.Namespace, prompts: Path) -> Curve:
    """The curve of one side, in a new process, as far as it comes within the limit."""
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__, str(args.model), "--side", side, "--prompts", str(prompts)]
        command += ["--bar", str(args.bar), "--max-steps", str(args.max_steps), "--work", str(Path(work, "run"))]
        command += ["--", *args.flags]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            timer = threading.Timer(args.limit_seconds, process.kill)
            timer.start()
            lines = list(process.stdout or ())
            timer.cancel()
        print("".join(line.removeprefix(PART_LINE) for line in lines if line.startswith(PART_LINE)), end="")
        curve = [json.loads(line.removeprefix(STEP_LINE)) for line in lines if line.startswith(STEP_LINE)]
        if process.returncode or not curve:
            errors.seek(0)
            print(f"{side} ended with {process.returncode}:\n{errors.read()[-3000:]}", flush=True)
    return curve


def report(side: str, curve: Curve, bar: float) -> float | None:
    """Print a side's row; return its seconds to the bar, if it got there."""
    if len(curve) < 2:
        return None
    steps = [after - before for (before, _), (after, _) in pairwise(curve)]
    typical = sorted(steps)[len(steps) // 2]
    rewards = [f"{reward:.3f}" for _, reward in curve[:: max(len(curve) // 8, 1)]]
    reached = curve[-1][0] if has_reached(curve, bar) else None
    end = (
        f"reward {bar} after {len(curve)} steps, {reached:.1f} s"
        if reached
        else f"not at {bar} after {len(curve)} steps"
    )
    print(
        f"{side:10} first step at {curve[0][0]:.1f} s, {typical:.3f} s a step (median); {end}; {' '.join(rewards)}",
        flush=True,
    )
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--bar", type=float, default=0.35, help="mean reward of five steps at which a side stops")
    parser.add_argument("--max-steps", type=int, default=110)
    parser.add_argument("--limit-seconds", type=float, default=600, help="at which a side is ended")
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=("miles", "trl"))
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    words = sys.argv[1:]
    own = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:own])
    args.flags = words[own + 1 :]
    if args.side is not None:
        run = partial(run_miles, more=args.flags) if args.side == "miles" else SIDES[args.side]
        run(args.model, args.prompts, args.max_steps, args.bar, args.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        write_prompts(args.model, prompts)
        reached = {side: report(side, measure_side(side, args, prompts), args.bar) for side in args.sides}
    ours = reached.pop("miles", None)
    for side, theirs in reached.items():
        if ours and theirs:
            print(f"{side} / miles: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
