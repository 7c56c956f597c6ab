"""Steps with prefill on one GPU: as CUDA graphs or kernel by kernel, at once or delayed (--engine-prefill-delay-steps).

    PYTHONPATH=src python benchmarks/bench_prefill_delay.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B]
        [--parts stream poisson steps] [--settings eager:0 eager:8 graphs:0 graphs:8] [--requests 768]
        [--rates 10 25] [--seconds 10] [--rounds 1]

bf16, random weights of the published shapes, the engine in this process, lengths of W (``bench_engine_gpu.py``); each
part alternates between the settings in one engine.

- ``stream``: all requests are queued from the start and 256 of them run, so that whenever one ends another is admitted:
  tokens per second, and how the steps with prefill were launched: as graphs, padded but kernel by kernel (the first of
  a size), or eagerly (too large for a graph).
- ``poisson``: requests arrive at a rate per second for some seconds: time to the first token of each, and the time
  per token after it, median and 95th percentile.
- ``steps``: 256 requests decode: milliseconds of the host in each part of a step, what it then waits for the GPU (if it
  waits, the GPU does not), and what the GPU does not compute between two steps and between the kernels of one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

RUNNING = 256
DECODE_STEPS = 64
SETTINGS = ("eager:0", "eager:8", "graphs:0", "graphs:8")  # how steps with prefill run, and steps of delay


@contextmanager
def apply_setting(engine: Any, graphs: bool, delay: int) -> Iterator[None]:
    """Run steps with prefill as graphs or not, and delay them."""
    from miles.backends.native.engine.scheduler import PrefillDelay

    inputs = engine._runner._graphs.prefill_inputs
    engine._scheduler.prefill_delay = PrefillDelay(delay)
    if not graphs:
        inputs.choose_shape = lambda batch: None
    try:
        yield
    finally:
        vars(inputs).pop("choose_shape", None)


@contextmanager
def count_launches(engine: Any) -> Iterator[Counter[str]]:
    """Count steps with prefill by how they are launched."""
    counts = Counter[str]()
    runner, graphs = engine._runner, engine._runner._graphs
    launch, run_eager, run_padded = runner.launch, runner._run_eager, graphs._run_eager

    def count(name: str, call: Callable[..., Any], prefill_only: bool = False) -> Callable[..., Any]:
        def counted(given: Any) -> Any:
            counts[name] += not (prefill_only and given.decode_only)
            return call(given)

        return counted

    runner.launch = count("all", launch, prefill_only=True)
    runner._run_eager = count("eager", run_eager)
    graphs._run_eager = count("padded", run_padded)
    try:
        yield counts
    finally:
        for owner, name in ((runner, "launch"), (runner, "_run_eager"), (graphs, "_run_eager")):
            del vars(owner)[name]


async def measure_stream(engine: Any, count: int) -> str:
    from bench_engine_gpu import _measure_requests, workload

    before, (prompts, lengths) = engine.stats()["steps"], workload("W", count)
    with count_launches(engine) as counts:
        spent = await _measure_requests(engine, prompts, lengths)
    steps = int(engine.stats()["steps"] - before)
    replayed = counts["all"] - counts["eager"] - counts["padded"]
    return (
        f"{sum(lengths) / spent:8,.0f} tok/s; {counts['all']} of {steps} steps with prefill: {replayed} replayed, "
        f"{counts['padded']} padded, {counts['eager']} eager"
    )


async def measure_poisson(engine: Any, rate: float, seconds: float) -> str:
    import numpy as np

    from miles.core.protocols import SamplingParams

    chance = Random(f"arrivals {rate}")
    firsts: list[float] = []
    rates: list[float] = []

    async def ask(prompt: list[int], length: int, seed: int, after: float) -> None:
        await asyncio.sleep(after)
        began, times = time.perf_counter(), list[float]()
        await engine.generate_stream(
            np.array(prompt, np.int32),
            SamplingParams(max_new_tokens=length, ignore_eos=True, seed=seed),
            lambda tokens: times.append(time.perf_counter()),
        )
        firsts.append(times[0] - began)
        rates.append((times[-1] - times[0]) / (length - 1))

    asked, after = list[asyncio.Task[None]](), 0.0
    while (after := after + chance.expovariate(rate)) < seconds:
        prompt = [chance.randint(0, 10000) for _ in range(chance.randint(100, 1024))]
        asked.append(asyncio.create_task(ask(prompt, chance.randint(100, 1024), len(asked), after)))
    with count_launches(engine) as counts:
        await asyncio.gather(*asked)
    replayed = counts["all"] - counts["eager"] - counts["padded"]
    return (
        f"{rate:g} requests/s: first token {show_percentiles(firsts)} ms, a token {show_percentiles(rates)} ms; "
        f"{counts['all']} steps with prefill: {replayed} replayed, {counts['padded']} padded, {counts['eager']} eager"
    )


def show_percentiles(seconds: Sequence[float]) -> str:
    """The median and the 95th percentile, in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:6.1f} {statistics.quantiles(seconds, n=20)[-1] * 1e3:6.1f}"


@contextmanager
def time_host(engine: Any) -> Iterator[dict[str, float]]:
    """Seconds of the host in each part of a step."""
    from miles.backends.native.runner.cuda_graph import GraphReplay

    spent = dict[str, float]()
    scheduler, runner = engine._scheduler, engine._runner

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

        return run

    wait = GraphReplay.result
    scheduler.schedule_step = timed("schedule", scheduler.schedule_step)
    runner.launch = timed("launch", runner.launch)
    scheduler.process_output = timed("process", scheduler.process_output)
    GraphReplay.result = timed("wait for the GPU", wait)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield spent
    finally:
        GraphReplay.result = wait
        for owner, name in ((scheduler, "schedule_step"), (runner, "launch"), (scheduler, "process_output")):
            del vars(owner)[name]


async def show_steps(model: str, engine: Any) -> None:
    from bench_engine_gpu import _measure_requests, workload
    from torch.profiler import ProfilerActivity, profile

    prompts = [prompt[:100] for prompt in workload("W")[0]]
    await _measure_requests(engine, prompts, [4] * RUNNING)
    before = engine.stats()["steps"]
    with time_host(engine) as spent:
        seconds = await _measure_requests(engine, prompts, [4 * DECODE_STEPS] * RUNNING)
    steps = engine.stats()["steps"] - before
    parts = ", ".join(f"{name} {value / steps * 1e3:.3f}" for name, value in spent.items())
    rest = seconds - sum(spent.values())
    print(f"{model:14s} a step: {seconds / steps * 1e3:.3f} ms; {parts}, rest {rest / steps * 1e3:.3f}", flush=True)
    before = engine.stats()["steps"]
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        await _measure_requests(engine, prompts, [DECODE_STEPS] * RUNNING)
    steps = engine.stats()["steps"] - before
    between, within, count = measure_gaps(seen)
    print(
        f"{model:14s} idle GPU, ms a step (profiled): {between / steps / 1e3:.3f} around copies, "
        f"{within / steps / 1e3:.3f} between {count / steps:.0f} kernels",
        flush=True,
    )


def measure_gaps(seen: Any) -> tuple[float, float, int]:
    """Microseconds in which nothing runs, next to copies between host and device and elsewhere; number of kernels."""
    events = [event for event in seen.events() or () if event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end, "Memcpy" in event.name) for event in events)
    between, within, last, was_copy = 0.0, 0.0, spans[0][0], True
    for start, end, is_copy in spans:
        gap = max(0.0, start - last)
        if gap > 1e5:  # the pause between requests
            gap = 0.0
        if is_copy or was_copy:
            between += gap
        else:
            within += gap
        last, was_copy = max(last, end), is_copy
    return between, within, sum(not is_copy for *_, is_copy in spans)


async def show(model: str, args: argparse.Namespace) -> None:
    from bench_bs1 import build_engine
    from bench_engine_gpu import _measure_requests, workload

    from miles.core.types import Version
    from miles.launch.runtime.gc_tuning import reduce_gc

    engine, publication, run = build_engine(model, RUNNING, 420_000)
    await publication.publish(Version())
    graphs, started, times = engine._runner._graphs, time.perf_counter(), list[float]()
    prefills = len(graphs.prefill_inputs.common_shapes)
    await engine.warm_up(lambda done, total: times.append(time.perf_counter() - started))
    print(
        f"{model:14s} {prefills} CUDA graphs of steps with prefill after {times[prefills - 1]:.1f} s (the first, which "
        f"compiles, {times[0]:.1f} s), all {len(times)} after {times[-1]:.1f} s",
        flush=True,
    )
    await _measure_requests(engine, workload("W", RUNNING)[0], [4] * RUNNING)

    async def measure(what: str, setting: str, run_part: Callable[[], Any]) -> None:
        await publication.publish(Version())  # an empty prefix cache
        how, _, delay = setting.partition(":")
        with apply_setting(engine, how == "graphs", int(delay)):
            found = await run_part()
        print(f"{model:14s} {how:6s} delay {delay}: {what} {found}", flush=True)

    with reduce_gc():
        for setting in args.rounds * args.settings if "stream" in args.parts else ():
            await measure("stream", setting, lambda: measure_stream(engine, args.requests))
        for rate in args.rates if "poisson" in args.parts else ():
            for setting in args.rounds * args.settings:
                await measure("poisson", setting, lambda rate=rate: measure_poisson(engine, rate, args.seconds))
        if "steps" in args.parts:
            await show_steps(model, engine)
    num_graphs = sum(key.num_tokens > 0 for key in engine._runner._graphs._graphs)
    print(f"{model:14s} {num_graphs} graphs of steps with prefill", flush=True)
    run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    parser.add_argument("--parts", nargs="+", choices=("stream", "poisson", "steps"), default=["stream", "poisson"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    parser.add_argument("--requests", type=int, default=768, help="total requests of stream")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 25.0], help="requests a second of poisson")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long requests of poisson arrive")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of all settings")
    args = parser.parse_args()
    import torch

    for model in args.models:
        asyncio.run(show(model, args))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
