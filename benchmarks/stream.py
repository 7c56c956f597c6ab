"""Prompts that come all the time, on one accelerator: what it gains that they wait for one another.

    python benchmarks/stream.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B] [--requests 768] [--rounds 2]

bf16, random weights of the published shapes. All requests are there from the start and 256 of them run, with the
lengths of W (``card.py``), so that whenever one ends another comes in. In turn in one process: prompts are read as soon
as there is a seat, or wait for some recorded steps to be read together (``--engine-prefill-patience``). Beside tokens a
second, how many of the steps read prompts: those are not recorded, and the host launches their every kernel.
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


async def timed(engine: Any, publication: Any, count: int, patience: int) -> tuple[float, int, int]:
    """Tokens a second, steps, and those of them that read prompts."""
    from card import _answers, workload

    from miles.backends.native.patience import Patience
    from miles.core.types import Version

    await publication.publish(Version())  # an empty prefix cache
    engine._scheduler.patience = Patience(patience)
    launch, reading = engine._runner._eager, 0

    def counted(order: Any) -> Any:
        nonlocal reading
        reading += 1
        return launch(order)

    engine._runner._eager = counted
    before, (prompts, lengths) = engine.stats()["steps"], workload("W", count)
    try:
        spent = await _answers(engine, prompts, lengths)
    finally:
        engine._runner._eager = launch
    return sum(lengths) / spent, int(engine.stats()["steps"] - before), reading


async def show(model: str, count: int, rounds: int) -> None:
    from card import _answers, workload
    from lone import engine_of

    from miles.backends.native.config import NativeConfig
    from miles.core.types import Version
    from miles.launch.garbage import collecting_seldom

    engine, publication, run = engine_of(model, RUNNING, 420_000)
    await publication.publish(Version())
    await engine.warm_up()
    await _answers(engine, workload("W", RUNNING)[0], [4] * RUNNING)
    with collecting_seldom():
        for patience in rounds * (0, NativeConfig().engine_prefill_patience):
            rate, steps, reading = await timed(engine, publication, count, patience)
            print(
                f"{model:14s} patience {patience}: {rate:8,.0f} tok/s, {reading:5d} of {steps} steps read prompts",
                flush=True,
            )
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--requests", type=int, default=768, help="requests in all")
    parser.add_argument("--rounds", type=int, default=2, help="how often both ways take their turn")
    args = parser.parse_args()
    import torch

    for model in args.models:
        asyncio.run(show(model, args.requests, args.rounds))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
