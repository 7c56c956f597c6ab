"""CPU seconds of a GRPO step of Miles and of TRL's GRPOTrainer, on the demo's task, model and batch, on one thread.

Both start from the same checkpoint (the demo's, after its warm-up) and make the same kind of step: 32 words × 8
responses of up to 8 tokens at temperature 1, an exact-match reward, group-relative advantages, one AdamW update in
float32. Miles runs `miles train` as the demo does: parity check, weight digests, event log, rollout files, metrics and
trace on, prompts shared by their samples. TRL writes nothing but its log. Each side is a process of its own and the two
alternate; the figure is the CPU time of the process and its children (user and system). A busy machine still makes it
larger, on both sides: compare only figures of one run.

    PYTHONPATH=src python benchmarks/bench_trl.py [--steps 35] [--rounds 2] [--python PYTHON_WITH_TRL]

TRL is no dependency of Miles: install `trl` and `datasets` in another environment and name its Python.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARMUP_STEPS = 5
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 32, 8, 8
THREAD_SETTINGS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def read_cpu_seconds() -> float:
    """User and system seconds of this process and of the children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_start(folder: Path) -> Path:
    """The demo up to its first step of GRPO; returns the checkpoint that GRPO starts from."""
    from miles.launch.commands.demo import DemoFolders, demo
    from miles.launch.config import DemoOptions

    demo(DemoOptions(steps=1, save=str(folder), plain=True))
    return next((DemoFolders(root=folder).warmup / "checkpoints").glob("step-*"))


def run_miles(start: Path, steps: int, work: Path, flags: list[str]) -> list[float]:
    """CPU time at the end of every step."""
    from miles.core.events import Event, StepFinished
    from miles.launch.commands.demo import DemoFolders, grpo_flags
    from miles.launch.commands.train import run
    from miles.launch.config import DemoOptions
    from miles.launch.read_config import read
    from miles.observe.view import NullView

    seconds: list[float] = []

    class StepTimer(NullView):
        def __call__(self, event: Event) -> None:
            if isinstance(event, StepFinished):
                seconds.append(read_cpu_seconds())

    folders = DemoFolders(root=start.parents[2])
    words = grpo_flags(folders, DemoOptions(steps=steps, num_threads=1, device="cpu"), start)
    interval = ["--eval-interval", str(steps + 1), "--save-interval", str(steps + 1), "--skip-eval-before-train"]
    config, plan, origins = read("train", [*words, *interval, "--save", str(work), *flags])
    run(config, plan, origins, view=StepTimer())
    return seconds


def run_trl(start: Path, steps: int, work: Path) -> list[float]:
    """The same with TRL."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    seconds: list[float] = []

    class StepTimer(TrainerCallback):
        def on_step_end(self, *args: Any, **values: Any) -> None:
            seconds.append(read_cpu_seconds())

    def reward(completions: list[str], label: list[str], **values: Any) -> list[float]:
        return [float(text == right) for text, right in zip(completions, label, strict=True)]

    rows = [json.loads(line) for line in (start.parents[2] / "start" / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["input"] + ">", "label": row["label"]} for row in rows])
    settings = GRPOConfig(
        output_dir=str(work),
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-3,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(start),
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(str(start)),
        callbacks=[StepTimer()],
    )
    trainer.train()
    return seconds


def measure_side(side: str, python: str, start: Path, steps: int, flags: list[str]) -> list[float]:
    """CPU seconds of each step after the warm-up, measured in a new process."""
    with tempfile.TemporaryDirectory() as work:
        command = [python, __file__, "--side", side, "--start", str(start), "--steps", str(steps), "--work", work]
        done = subprocess.run([*command, *flags], env=os.environ | THREAD_SETTINGS, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the side {side} failed:\n{done.stderr[-4000:]}")
        times = json.loads(done.stdout.splitlines()[-1])
    return [after - before for before, after in zip(times[WARMUP_STEPS - 1 :], times[WARMUP_STEPS:], strict=False)]


def report(sides: dict[str, list[float]]) -> None:
    means = {side: statistics.fmean(steps) for side, steps in sides.items()}
    for side, steps in sides.items():
        print(f"{side:6} {means[side]:.3f} CPU-s a step (median {statistics.median(steps):.3f}, {len(steps)} steps)")
    print(f"TRL / Miles: {means['trl'] / means['miles']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--start", type=Path, help="a checkpoint of the demo's warm-up; made anew if not given")
    parser.add_argument("--side", choices=("miles", "trl"), help="run one side in this process")
    parser.add_argument("--work", type=Path)
    options, flags = parser.parse_known_args()
    if options.side is not None:
        if options.side == "miles":
            times = run_miles(options.start, options.steps, options.work, flags)
        else:
            times = run_trl(options.start, options.steps, options.work)
        print(json.dumps(times))
        return
    with tempfile.TemporaryDirectory() as folder:
        start = options.start or write_start(Path(folder))
        measured: dict[str, list[float]] = {"miles": [], "trl": []}
        for _ in range(options.rounds):
            measured["miles"] += measure_side("miles", sys.executable, start, options.steps, flags)
            measured["trl"] += measure_side("trl", options.python, start, options.steps, [])
        report(measured)


if __name__ == "__main__":
    main()
