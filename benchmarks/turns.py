"""What it costs an engine that it sleeps while a trainer works, or is given copies of its weights, on one accelerator.

    python benchmarks/turns.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B] [--rounds 2]

bf16, random weights of the published shapes, the workload W of ``card.py``. In turn in one process: W with nothing
between; W after the engine slept and woke, with the steps it had recorded before; and the same with the recordings
thrown away, which is what sleep came to while the cache did not come back to the same address. Sleep and wake are timed
apart; the limit is W with nothing between. Beside it, the device memory that stays taken in sleep. Where two copies of
the weights fit, W also after a copy of them came, in place of the copy there was.
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


def taken() -> float:
    """GiB of the device that are not free."""
    import torch

    torch.cuda.synchronize()
    free, there = torch.cuda.mem_get_info()
    return (there - free) / 2**30


async def turn(engine: Any, publication: Any, way: str) -> tuple[float, float, float, float]:
    """Seconds of sleep, of waking up and of W, and GiB taken in sleep."""
    import torch
    from card import _answers, workload

    from miles.core.types import Version

    slept = woke = asleep = 0.0
    if way != "awake":
        began = time.perf_counter()
        await engine.sleep()
        torch.cuda.synchronize()
        slept, asleep, began = time.perf_counter() - began, taken(), time.perf_counter()
        await engine.wake()
        torch.cuda.synchronize()
        woke = time.perf_counter() - began
    if way == "thrown away":
        engine._runner._graphs.forget()
    await publication.publish(Version())  # an empty prefix cache
    return slept, woke, await _answers(engine, *workload("W")), asleep


async def show(model: str, rounds: int) -> None:
    import torch
    from card import _answers, workload
    from lone import engine_of

    from miles.core.types import Version
    from miles.launch.garbage import collecting_seldom

    engine, publication, run = engine_of(model, RUNNING, 420_000)
    await publication.publish(Version())
    before = time.perf_counter()
    await engine.warm_up()
    print(f"{model:14s} recorded in {time.perf_counter() - before:.1f} s; {taken():.2f} GiB taken", flush=True)
    await _answers(engine, workload("W", RUNNING)[0], [4] * RUNNING)
    with collecting_seldom():
        for way in rounds * ("awake", "kept", "thrown away"):
            slept, woke, spent, asleep = await turn(engine, publication, way)
            rate = sum(workload("W")[1]) / spent
            rest = f" asleep after {slept:.3f} s, {asleep:.2f} GiB; awake after {woke:.3f} s" if way != "awake" else ""
            print(f"{model:14s} {way:12s} W {spent:7.3f} s, {rate:8,.0f} tok/s;{rest}", flush=True)
        if 3 * sum(tensor.nbytes for tensor in engine.weights().values()) < torch.cuda.mem_get_info()[1] // 2:
            await copied(model, engine, run, rounds)
    run.close()


async def copied(model: str, engine: Any, run: Any, rounds: int) -> None:
    from card import _answers, workload

    from miles.core.types import Version
    from miles.sync.publish import Publication

    weights = {name: tensor.detach() for name, tensor in engine.weights().items()}
    publication = Publication(weights=lambda: weights, engines=[engine], transport="copy", run=run)
    for number in range(1 + rounds):
        began = time.perf_counter()
        await publication.publish(Version(number=number))
        sent, spent = time.perf_counter() - began, await _answers(engine, *workload("W"))
        way, rate = "copied again" if number else "first copy", sum(workload("W")[1]) / spent
        print(f"{model:14s} {way:12s} W {spent:7.3f} s, {rate:8,.0f} tok/s; sent in {sent:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--rounds", type=int, default=2, help="how often all ways take their turn")
    args = parser.parse_args()
    import torch

    for model in args.models:
        asyncio.run(show(model, args.rounds))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
