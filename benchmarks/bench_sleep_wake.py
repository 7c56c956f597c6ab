"""Cost of sleep and wake, and of weight updates by copy, of a colocated engine on one GPU.

    python benchmarks/bench_sleep_wake.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B] [--rounds 2]

bf16, random weights of the published shapes, the workload W of ``bench_engine_gpu.py``. Alternating in one process: W
without sleep; W after sleep and wake, with the CUDA graphs captured before; and the same with the graphs discarded,
which is what sleep would cost if the KV cache did not return to the same address. Sleep and wake are timed separately;
the limit is W without sleep. Also the device memory in use during sleep. If two copies of the weights fit, W also after
the weights were updated by copy.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

RUNNING = 256


def used_gib() -> float:
    """Return the GiB of device memory in use."""
    import torch

    torch.cuda.synchronize()
    free, there = torch.cuda.mem_get_info()
    return (there - free) / 2**30


async def measure(engine: Any, publication: Any, mode: str) -> tuple[float, float, float, float]:
    """Return seconds of sleep, wake and W, and GiB in use during sleep."""
    import torch
    from bench_engine_gpu import _measure_requests, workload

    from miles.core.types import Version

    slept = woke = asleep = 0.0
    if mode != "awake":
        began = time.perf_counter()
        await engine.sleep()
        torch.cuda.synchronize()
        slept, asleep, began = time.perf_counter() - began, used_gib(), time.perf_counter()
        await engine.wake()
        torch.cuda.synchronize()
        woke = time.perf_counter() - began
    if mode == "graphs discarded":
        engine._runner._graphs.invalidate()
    await publication.publish(Version())  # an empty prefix cache
    return slept, woke, await _measure_requests(engine, *workload("W")), asleep


async def show(model: str, rounds: int) -> None:
    import torch
    from bench_bs1 import build_engine
    from bench_engine_gpu import _measure_requests, workload

    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc

    engine, publication, run = build_engine(model, RUNNING, 420_000)
    await publication.publish(Version())
    before = time.perf_counter()
    await engine.warm_up()
    print(f"{model:14s} captured in {time.perf_counter() - before:.1f} s; {used_gib():.2f} GiB in use", flush=True)
    await _measure_requests(engine, workload("W", RUNNING)[0], [4] * RUNNING)
    with reduce_gc():
        for mode in rounds * ("awake", "graphs kept", "graphs discarded"):
            slept, woke, spent, asleep = await measure(engine, publication, mode)
            rate = sum(workload("W")[1]) / spent
            rest = f" asleep after {slept:.3f} s, {asleep:.2f} GiB; awake after {woke:.3f} s" if mode != "awake" else ""
            print(f"{model:14s} {mode:16s} W {spent:7.3f} s, {rate:8,.0f} tok/s;{rest}", flush=True)
        if 3 * sum(tensor.nbytes for tensor in engine.weights().values()) < torch.cuda.mem_get_info()[1] // 2:
            await measure_copies(model, engine, run, rounds)
    run.close()


async def measure_copies(model: str, engine: Any, run: Any, rounds: int) -> None:
    from bench_engine_gpu import _measure_requests, workload

    from miles.core.types import Version
    from miles.sync.publish import Publication

    weights = {name: tensor.detach() for name, tensor in engine.weights().items()}
    publication = Publication(weights=lambda: weights, engines=[engine], transport="copy", run=run)
    for number in range(1 + rounds):
        began = time.perf_counter()
        await publication.publish(Version(number=number))
        sent, spent = time.perf_counter() - began, await _measure_requests(engine, *workload("W"))
        mode, rate = "copied again" if number else "first copy", sum(workload("W")[1]) / spent
        print(f"{model:14s} {mode:12s} W {spent:7.3f} s, {rate:8,.0f} tok/s; sent in {sent:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of all modes")
    args = parser.parse_args()
    import torch

    for model in args.models:
        asyncio.run(show(model, args.rounds))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
