"""Driver scalability: the real loop against simulated engines and trainers, up to 1,024 engines, 100,000 trajectories.

Simulated hours pass in seconds (see ``scale_simulation.py``), so what is measured is the driver's own CPU time: in all,
by component (see ``scale_profile.py``), and its memory. Sockets are not included: server responses are built and parsed
as JSON, but nothing is sent. Run it as ``python -m benchmarks.bench_scale``; each size is a process of its own, and
``--only`` names some.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.scale_profile import GARBAGE, SIMULATED, ComponentProfile
from benchmarks.scale_simulation import JumpingLoop, Size, World

from miles.launch.runtime.gc_tuning import reduce_gc

FULL = Size(engines=1024, inside=100_000)
SIZES: Mapping[str, Size] = {
    "1k inside, 64 engines": replace(FULL, engines=64, inside=1024, steps=24),
    "10k inside, 64 engines": replace(FULL, engines=64, inside=10_240),
    "10k inside, 256 engines": replace(FULL, engines=256, inside=10_240),
    "10k inside, 1,024 engines": replace(FULL, inside=10_240),
    "100k inside, 1,024 engines": FULL,
    "10k inside, 256, kept": replace(FULL, engines=256, inside=10_240, mode="in_place"),
    "10k, in strict order": replace(FULL, inside=10_240, overtake=0),
    "10k, 8x the tokens": replace(FULL, inside=10_240, tokens=8 * FULL.tokens),
}
COMPONENTS = (
    "admission",
    "load balancing",
    "requests",
    "rollout",
    "scoring",
    "filter and advantages",
    "reorder buffer and batch",
    "event log",
    "step metrics",
    "cursor",
    "publish",
    "event loop",
    GARBAGE,
)


def run_simulation(size: Size, folder: Path) -> World:
    """A whole run; what it was is in ``seen``."""
    loop = JumpingLoop()
    try:
        world = World(size, folder, loop)
        loop.run_until_complete(world.run())
    finally:
        loop.close()
    return world


def measure_run(size: Size) -> dict[str, Any]:
    """One run in this process, and what it cost."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_simulation(Size(inside=128, engines=2, steps=2), Path(folder, "warm"))
        with reduce_gc(size.inside):
            before, started = _resident("VmRSS"), time.process_time()
            with ComponentProfile() as parts:
                world = run_simulation(size, Path(folder, "run"))
            cpu = time.process_time() - started
        log = Path(folder, "run", "events.jsonl").stat().st_size
    seen = world.seen
    count = seen.groups * size.attempts
    driver = cpu - parts.seconds[SIMULATED]
    mean = {part: 1e6 * parts.seconds[part] / count for part in COMPONENTS}
    published = parts.seconds["publish"] / (seen.steps + 1)
    return {
        "trajectories": count,
        "cpu": cpu,
        "each": 1e6 * driver / count,
        "parts": mean,
        "bytes": (_resident("VmHWM") - before) / (seen.most_inside * size.attempts),
        "peak": _resident("VmHWM"),
        "events": seen.events / driver,
        "log": log / count,
        "publish_each": 1e6 * published / size.engines,
        "sent_each": sum(world.sent.values()) / (seen.steps + 1) / size.engines,
        "longest_collection": parts.longest_collection,
        **{name: float(value) for name, value in world.utilisation().items()},
        **{name: value for name, value in asdict(seen).items() if name != "trained"},
    }


def _resident(field: str) -> int:
    """Bytes, as the kernel counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def format_rows(name: str, size: Size, found: Mapping[str, Any]) -> Sequence[str]:
    """A size's rows of the table."""
    head = (
        f"{name:28}{found['each']:9.0f}{found['bytes'] / 1024:9.1f}{found['peak'] / 2**30:8.2f}{found['events']:9.0f}"
        f"{found['log']:7.0f}{found['publish_each']:9.0f}{100 * found['engines']:8.0f}{100 * found['trainer']:8.0f}"
        f"{found['longest_collection']:8.2f}{found['span']:9.0f}{found['cpu']:8.1f}{found['most_under_way']:9d}"
    )
    return [head, "    " + ", ".join(f"{part} {found['parts'][part]:.0f}" for part in COMPONENTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--one", choices=list(SIZES), help="measure one size in this process and print JSON")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure_run(SIZES[args.one])))
        return
    print("microseconds of CPU a trajectory; KiB more memory a trajectory inside; GiB at the peak; events a CPU")
    print("second; bytes of event log a trajectory; microseconds of publication an engine; % busy; s; s; s; requests")
    print(
        f"{'size':28}{'us each':>9}{'KiB each':>9}{'GiB':>8}{'events/s':>9}{'log':>7}{'pub us':>9}{'engines':>8}"
        f"{'trainer':>8}{'gc max':>8}{'sim s':>9}{'cpu s':>8}{'at once':>9}",
        flush=True,
    )
    for name in args.only:
        line = [sys.executable, "-m", "benchmarks.bench_scale", "--one", name]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        print("\n".join(format_rows(name, SIZES[name], json.loads(done.stdout.splitlines()[-1]))), flush=True)


if __name__ == "__main__":
    main()
