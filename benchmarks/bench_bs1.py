"""Batch-size-1 decode latency on one GPU: inter-token latency, CUDA graph time, and time per kernel.

    python benchmarks/bench_bs1.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B]

bf16, random weights of the published shapes. For each model: the inter-token latency of the engine; its CUDA graph
replayed back to back; the same graph captured without attention, to see what the rest takes; and each kernel, from the
end of the previous one to its own. The limit is reading the weights of one token once, at the GPU's measured copy rate.
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

# Prompt and response tokens, and the first response tokens left out of the time, so that it excludes the prefill.
PROMPT_TOKENS, RESPONSE_TOKENS, SKIPPED_TOKENS = 128, 512, 16


def build_engine(model: str, running: int = 8, tokens: int = 20_000) -> tuple[Any, Any, Any]:
    """Return an engine with random weights, the publication of them, and its executor."""
    import torch
    from bench_engine_gpu import spec_named

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine.engine import NativeEngine
    from miles.cluster.executor import ThreadExecutor
    from miles.cluster.platform import detect_platform
    from miles.models.decoder import Decoder
    from miles.sync.publish import Publication

    spec, device, run = spec_named(model), detect_platform("cuda").device, ThreadExecutor("engine")
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    config = NativeConfig(engine_max_running=running, engine_kv_tokens=tokens)
    engine = NativeEngine(spec, device=device, dtype=torch.bfloat16, config=config, run=run, decode=None)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    return engine, Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run), run


async def measure_latency(engine: Any, publication: Any) -> float:
    """Return the inter-token latency in seconds."""
    import numpy as np

    from miles.core.protocols import SamplingParams
    from miles.core.types import Version

    await publication.publish(Version())
    prompt, times = np.arange(PROMPT_TOKENS, dtype=np.int32), []
    for tokens in (SKIPPED_TOKENS, SKIPPED_TOKENS, RESPONSE_TOKENS):  # the first one compiles and captures
        started = time.perf_counter()
        await engine.generate(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=1))
        times.append(time.perf_counter() - started)
    return (times[2] - times[1]) / (RESPONSE_TOKENS - SKIPPED_TOKENS)


def measure_replay(graphs: Any, key: Any) -> float:
    """Return seconds per graph replay, back to back."""
    from bench_engine_gpu import _seconds

    graph = graphs._graphs[key].graph
    return _seconds(lambda: [graph.replay() for _ in range(100)]) / 100


def measure_without_attention(graphs: Any, key: Any) -> float:
    """Return seconds per replay of a graph whose queries go straight into the output projection."""
    import torch

    from miles.kernels.attention import decode_bs1

    attend, decode_bs1.decode_bs1_attention = (
        decode_bs1.decode_bs1_attention,
        lambda qkv_1N, heads, *_: qkv_1N[:, : heads.heads * heads.head_dim],
    )
    try:
        graphs.invalidate()
        graphs._warmed_up.discard(key)
        graphs._capture(key)
    finally:
        decode_bs1.decode_bs1_attention = attend
    torch.cuda.synchronize()
    return measure_replay(graphs, key)


def profile_kernels(graphs: Any, key: Any, steps: int = 20) -> list[tuple[str, float, float]]:
    """Return name, count and microseconds (from the end of the previous kernel) of the kernels of one replay."""
    import torch
    from bench_engine_gpu import summarize_kernels
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            graphs._graphs[key].graph.replay()
        torch.cuda.synchronize()
    table = [(name, count / steps, busy / count) for name, (count, busy) in summarize_kernels(seen, gaps=True).items()]
    return sorted(table, key=lambda row: -row[1] * row[2])[:10]


def show(model: str, limit: float) -> None:
    import torch

    from miles.backends.native.runner.cuda_graph import CudaGraphRunner, GraphKey

    engine, publication, run = build_engine(model)
    latency, key = asyncio.run(measure_latency(engine, publication)), GraphKey(1, False, False)
    graphs = next(each for each in gc.get_objects() if type(each) is CudaGraphRunner)
    replay, table = measure_replay(graphs, key), profile_kernels(graphs, key)
    for name, spent in (
        ("reading the weights once", limit),
        ("inter-token latency", latency),
        ("graph replay", replay),
        ("graph replay without attention", measure_without_attention(graphs, key)),
    ):
        print(f"{model:14s} {name:34s} {spent * 1e3:7.3f} ms {spent / limit:6.2f}x")
    for name, count, spent in table:
        print(f"    {count * spent:8.1f} us per step: {count:4.0f} x {spent:6.2f}  {name[:70]}")
    run.close()
    del engine, publication, graphs
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    args = parser.parse_args()
    from bench_engine_gpu import limits

    limit = limits(args.models, [], ["ours"])
    print(f"copy {limit['copy_tb']:.2f} TB/s")
    for model in args.models:
        show(model, limit[f"{model} ours"]["alone_ms"] / 1e3)


if __name__ == "__main__":
    main()
