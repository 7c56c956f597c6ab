"""Throughput gained by delaying prefills (--engine-prefill-delay-steps) under a steady stream of prompts, on one GPU.

    python benchmarks/bench_prefill_delay.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B] [--requests 768] [--rounds 2]

bf16, random weights of the published shapes. All requests are queued from the start and 256 of them run, with the
lengths of W (``bench_engine_gpu.py``), so that whenever one ends another is admitted. Alternating in one process:
prompts are prefilled as soon as there is a slot, or delayed to be prefilled together. Besides tokens per second, the
number of steps with prefills: those are not CUDA graphs, and the host launches each of their kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

RUNNING = 256


async def measure(engine: Any, publication: Any, count: int, delay: int) -> tuple[float, int, int]:
    """Return tokens per second, steps, and steps with prefills."""
    from bench_engine_gpu import _measure_requests, workload

    from miles.backends.native.engine.scheduler import PrefillDelay
    from miles.core.types import Version

    await publication.publish(Version())  # an empty prefix cache
    engine._scheduler.prefill_delay = PrefillDelay(delay)
    run_eager, prefill_steps = engine._runner._run_eager, 0

    def count_eager(batch: Any) -> Any:
        nonlocal prefill_steps
        prefill_steps += 1
        return run_eager(batch)

    engine._runner._run_eager = count_eager
    before, (prompts, lengths) = engine.stats()["steps"], workload("W", count)
    try:
        spent = await _measure_requests(engine, prompts, lengths)
    finally:
        engine._runner._run_eager = run_eager
    return sum(lengths) / spent, int(engine.stats()["steps"] - before), prefill_steps


async def show(model: str, count: int, rounds: int) -> None:
    from bench_bs1 import build_engine
    from bench_engine_gpu import _measure_requests, workload

    from miles.backends.native.config import NativeConfig
    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc

    engine, publication, run = build_engine(model, RUNNING, 420_000)
    await publication.publish(Version())
    await engine.warm_up()
    await _measure_requests(engine, workload("W", RUNNING)[0], [4] * RUNNING)
    with reduce_gc():
        for delay in rounds * (0, NativeConfig().engine_prefill_delay_steps):
            rate, steps, prefill_steps = await measure(engine, publication, count, delay)
            print(
                f"{model:14s} delay {delay}: {rate:8,.0f} tok/s, {prefill_steps:5d} of {steps} steps with prefills",
                flush=True,
            )
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--requests", type=int, default=768, help="total requests")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of both settings")
    args = parser.parse_args()
    import torch

    for model in args.models:
        asyncio.run(show(model, args.requests, args.rounds))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
