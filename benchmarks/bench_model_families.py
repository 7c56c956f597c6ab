"""GRPO runs on a GPU with a small model of every architecture: the reported parity in both precisions.

Models are built by transformers with large random weights, as in the tests, and trained for three steps through the
command line. In float32 engine and trainer agree to rounding; in bfloat16 the bound is what their different kernels
round away.

    PYTHONPATH=src:. python benchmarks/bench_model_families.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.launch.test_family_runs import KINDS, MORE, argv_of, furnish

DTYPES = ("float32", "bfloat16")


def run(folder: Path, kind: str, dtype: str, device: str) -> tuple[float, float]:
    """Worst mean and worst single difference of a token's log-prob between the planes."""
    world = folder / kind
    argv = argv_of(world, folder / f"{kind}-{dtype}", "--dtype", dtype, steps=3)
    argv[argv.index("--device") + 1] = device
    command = [sys.executable, "-m", "miles.launch.main", "train", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} in {dtype} failed:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    lines = (folder / f"{kind}-{dtype}" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "parity_mean_abs" in step]
    return max(step["parity_mean_abs"] for step in steps), max(step["parity_max_abs"] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--all", action="store_true", help="more kinds than one of each mechanism")
    args = parser.parse_args()
    kinds = [*KINDS, *(MORE if args.all else ())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in kinds:
            (folder / kind).mkdir()
            furnish(folder / kind, kind)
        with ThreadPoolExecutor(args.jobs) as pool:
            jobs = {(k, d): pool.submit(run, folder, k, d, args.device) for k in kinds for d in DTYPES}
        print("| kind | float32, mean | largest | bfloat16, mean | largest |\n|---|--:|--:|--:|--:|")
        for kind in kinds:
            cells = " | ".join(f"{number:.1e}" for dtype in DTYPES for number in jobs[kind, dtype].result())
            print(f"| {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
