"""Where the time between two tokens of a lone request goes, on one accelerator.

    python benchmarks/lone.py [--models Qwen3-0.6B Qwen3-4B Qwen3-30B-A3B]

bf16, random weights of the published shapes. Of each model: the time between two tokens as the engine gives it; the
step as it was recorded, again and again with nothing between; the same recorded without attention, which is no longer
the model, but says what the rest takes; and each kernel, from the end of the one before it to its own. The limit is
reading once the weights that a token needs, at the card's measured copy rate.
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

# What is asked, what follows it, and how much of that is left out of the time, so that the prompt is no part of it.
PROMPT, REPLY, BEFORE = 128, 512, 16


def engine_of(model: str, running: int = 8, tokens: int = 20_000) -> tuple[Any, Any, Any]:
    """An engine with random weights, what publishes them, and the thread it steps on."""
    import torch
    from card import spec_named

    from miles.backends.native.config import NativeConfig
    from miles.backends.native.engine import NativeEngine
    from miles.cluster.local import Threaded
    from miles.cluster.platform import find
    from miles.models.decoder import Decoder
    from miles.sync.publish import Publication

    spec, device, run = spec_named(model), find("cuda").device, Threaded("engine")
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    for parameter in decoder.parameters():
        parameter.data.normal_(std=0.02)
    config = NativeConfig(engine_max_running=running, engine_kv_tokens=tokens)
    engine = NativeEngine(spec, device=device, dtype=torch.bfloat16, config=config, run=run, decode=None)
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    return engine, Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run), run


async def asked(engine: Any, publication: Any) -> float:
    """Seconds between two tokens."""
    import numpy as np

    from miles.core.protocols import Sampling
    from miles.core.types import Version

    await publication.publish(Version())
    prompt, times = np.arange(PROMPT, dtype=np.int32), []
    for tokens in (BEFORE, BEFORE, REPLY):  # the first of them compiles and records
        started = time.perf_counter()
        await engine.generate(prompt, Sampling(max_new_tokens=tokens, ignore_eos=True, seed=1))
        times.append(time.perf_counter() - started)
    return (times[2] - times[1]) / (REPLY - BEFORE)


def recorded(graphs: Any, key: Any) -> float:
    """Seconds of a recorded step, with nothing between it and the next."""
    from card import _seconds

    graph = graphs._graphs[key].graph
    return _seconds(lambda: [graph.replay() for _ in range(100)]) / 100


def without_attention(graphs: Any, key: Any) -> float:
    """The same of a step in which queries go straight into the projection behind attention."""
    import torch

    from miles.kernels import alone

    attend, alone.attend_one = alone.attend_one, lambda qkv_1N, heads, *_: qkv_1N[:, : heads.heads * heads.head_dim]
    try:
        graphs.forget()
        graphs._warmed.discard(key)
        graphs._record(key)
    finally:
        alone.attend_one = attend
    torch.cuda.synchronize()
    return recorded(graphs, key)


def kernels(graphs: Any, key: Any, steps: int = 20) -> list[tuple[str, float, float]]:
    """Kernels of a recorded step: name, how many, and microseconds from the end of the one before to its own."""
    import torch
    from card import kernels_of
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            graphs._graphs[key].graph.replay()
        torch.cuda.synchronize()
    table = [(name, count / steps, busy / count) for name, (count, busy) in kernels_of(seen, gaps=True).items()]
    return sorted(table, key=lambda row: -row[1] * row[2])[:10]


def show(model: str, limit: float) -> None:
    import torch

    from miles.backends.native.graphs import Graphs, Key

    engine, publication, run = engine_of(model)
    each, key = asyncio.run(asked(engine, publication)), Key(1, False, False)
    graphs = next(held for held in gc.get_objects() if type(held) is Graphs)
    whole, table = recorded(graphs, key), kernels(graphs, key)
    for name, spent in (
        ("reading the weights once", limit),
        ("between two tokens", each),
        ("a recorded step", whole),
        ("a recorded step without attention", without_attention(graphs, key)),
    ):
        print(f"{model:14s} {name:34s} {spent * 1e3:7.3f} ms {spent / limit:6.2f}x")
    for name, count, spent in table:
        print(f"    {count * spent:8.1f} us a step: {count:4.0f} x {spent:6.2f}  {name[:70]}")
    run.close()
    del engine, publication, graphs
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"])
    args = parser.parse_args()
    from card import limits

    limit = limits(args.models, [])
    print(f"copy {limit['copy_tb']:.2f} TB/s")
    for model in args.models:
        show(model, limit[model]["alone_ms"] / 1e3)


if __name__ == "__main__":
    main()
