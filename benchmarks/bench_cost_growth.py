"""How the CPU time of a GRPO step grows with prompts, samples, context and files written, and where it is not linear.

Whole runs of `miles train` on the demo's model with random weights, all in this process, on one thread: one dimension
grows while the others stay. The figure is the CPU seconds of a step (this process and its children), and how much a
doubling multiplies it: 2.0 is linear, below 2 a fixed part is left, above 2 it is superlinear. Many engines are
simulated in `bench_scale.py`.

    PYTHONPATH=src python benchmarks/bench_cost_growth.py [--steps 8] [--only prompts,samples,context,files]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from pathlib import Path
from statistics import median
from string import ascii_lowercase

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench_trl import read_cpu_seconds

WARMUP_STEPS = 2
RESPONSE = 8
DIMENSIONS: Mapping[str, Sequence[int]] = {
    "prompts": (8, 16, 32, 64, 128),
    "samples": (4, 8, 16, 32, 64),
    "context": (8, 64, 128, 256, 512),
}
FIXED_FLAGS = "--input-key input --label-key label --rm-type exact --num-threads 1 --device cpu --share-prefix"
NO_FILES = ["--disable-save-rollouts", "--gauge-interval", "0"]
BASE = {"prompts": 16, "samples": 8, "context": 8}


def write_inputs(folder: Path, lengths: Sequence[int]) -> None:
    """The demo's model with room for the longest context, and a data file for each length of prompt."""
    import torch

    from miles.kernels.numerics import FAST
    from miles.launch.commands import demo_task
    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    spec = replace(demo_task.spec(moe=False), max_positions=2 * max(lengths))
    decoder = hf.init_random(spec, seed=0, device="cpu", dtype=torch.float32, numerics=FAST)
    folder.mkdir()
    hf.export(decoder, folder, like=None, config=config_from_spec(spec))
    demo_task.write_tokenizer(folder)
    chance = random.Random(0)
    for length in lengths:
        words = ["".join(chance.choices(ascii_lowercase, k=length)) for _ in range(512)]
        rows = "".join(json.dumps({"input": word, "label": word[:3]}) + "\n" for word in words)
        (folder / f"{length}.jsonl").write_text(rows)


def measure_step(folder: Path, work: Path, size: Mapping[str, int], steps: int, flags: Sequence[str]) -> float:
    """Median CPU seconds of a step of one run."""
    from miles.core.events import Event, StepFinished
    from miles.launch.commands.train import run
    from miles.launch.read_config import read
    from miles.observe.view import NullView

    times: list[float] = []

    class StepTimer(NullView):
        def __call__(self, event: Event) -> None:
            if isinstance(event, StepFinished):
                times.append(read_cpu_seconds())

    values = {
        "--hf-checkpoint": folder,
        "--prompt-data": folder / f"{size['context']}.jsonl",
        "--save": work,
        "--num-rollout": steps,
        "--rollout-batch-size": size["prompts"],
        "--n-samples-per-prompt": size["samples"],
        "--rollout-max-response-len": RESPONSE,
        "--save-interval": steps + 1,
    }
    words = [str(word) for pair in values.items() for word in pair]
    config, plan, origins = read("train", [*words, *FIXED_FLAGS.split(), *flags])
    run(config, plan, origins, view=StepTimer())
    return median(
        after - before for before, after in zip(times[WARMUP_STEPS:], times[WARMUP_STEPS + 1 :], strict=False)
    )


def print_growth(name: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    """Print the time at each size, and by how much a doubling multiplied it since the size before."""
    print(f"{name:>10}  CPU ms a step   for a doubling")
    for index, (size, spent) in enumerate(zip(sizes, seconds, strict=True)):
        factor = ""
        if index:
            factor = f"{2 ** (log2(spent / seconds[index - 1]) / log2(size / sizes[index - 1])):.2f}"
        print(f"{size:>10}  {spent * 1e3:>10.1f}      {factor}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="prompts,samples,context,files")
    options = parser.parse_args()
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_inputs(folder, DIMENSIONS["context"])
        number = 0
        for dimension, sizes in DIMENSIONS.items():
            if dimension not in wanted:
                continue
            seconds: list[float] = []
            for size in sizes:
                number += 1
                work = Path(name) / f"run-{number}"
                seconds.append(measure_step(folder, work, BASE | {dimension: size}, options.steps, []))
            print_growth(dimension, sizes, seconds)
        if "files" in wanted:
            sides = {"all on": [], "no rollout files, no gauges": NO_FILES}
            for number, (title, flags) in enumerate(sides.items()):
                spent = measure_step(
                    folder, Path(name) / f"files-{number}", BASE | {"prompts": 32}, options.steps, flags
                )
                print(f"{title:>28}  {spent * 1e3:.1f} CPU ms a step", flush=True)


if __name__ == "__main__":
    main()
