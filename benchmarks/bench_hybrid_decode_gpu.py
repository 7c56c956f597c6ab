"""Decode of models with recurrent layers or sparse attention on a GPU: CUDA graphs against eager steps.

    PYTHONPATH=src python benchmarks/bench_hybrid_decode_gpu.py [--models NAME=LAYERS ...] [--batch-sizes 1 32 128]

Published shapes cut to some layers, with random weights in bfloat16. Prompts have 64 tokens, and the step time is that
of ``--tokens`` decode steps behind them: the time of a long generation less that of a short one. With
``--parity exact`` the kernels are batch-invariant.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace

import numpy as np
import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import ThreadExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.kernels.numerics import Numerics, configure_cublas, numerics_from_parity
from miles.models.accounting.known_models import find_known_config
from miles.models.decoder import Decoder
from miles.models.families.registry import spec_from_config
from miles.models.spec import DecoderSpec
from miles.sync.manifest import build_manifest

MODELS = (
    "Qwen3-Next-80B-A3B=8",
    "Qwen3.5-9B=12",
    "Nemotron-3-Nano-30B-A3B=14",
    "Kimi-Linear-48B-A3B-Instruct=8",
    "DeepSeek-V3.2=4",
    "MiniMax-M3=4",
)
PROMPT, OPENING = 64, 4


def build_spec(name: str) -> DecoderSpec:
    """Return the first layers of a published shape."""
    model, _, layers = name.partition("=")
    config = find_known_config(model)
    assert config is not None, f"{model} is not among the published shapes"
    spec = spec_from_config(config)
    return replace(spec, layers=spec.layers[: int(layers)] if layers else spec.layers, vision=None, eos_token_ids=())


def build_engine(
    spec: DecoderSpec,
    weights: dict[str, torch.Tensor],
    graphs: bool,
    numerics: Numerics,
    rows: int,
    run: ThreadExecutor,
) -> NativeEngine:
    engine = NativeEngine(
        spec,
        device=next(iter(weights.values())).device,
        dtype=torch.bfloat16,
        config=NativeConfig(
            engine_max_running=rows, engine_kv_tokens=rows * 1024, engine_cuda_graph=graphs, engine_state_cache_mib=0
        ),
        run=run,
        decode=None,
        numerics=numerics,
    )
    engine.begin(build_manifest(Version(), weights))
    for name, tensor in weights.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    return engine


async def measure(engine: NativeEngine, rows: int, tokens: int) -> float:
    """Return the seconds that ``rows`` requests of so many new tokens take."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 10_000, PROMPT).astype(np.int32) for _ in range(rows)]
    started = time.perf_counter()
    await asyncio.gather(
        *(
            engine.generate(prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=i))
            for i, prompt in enumerate(prompts)
        )
    )
    return time.perf_counter() - started


async def run_engine(engine: NativeEngine, batch_sizes: list[int], tokens: int) -> dict[int, float]:
    """Return the seconds of a decode step for each batch size."""
    found: dict[int, float] = {}
    for rows in batch_sizes:
        await measure(engine, rows, OPENING + 4)  # compilers and captures
        opening = await measure(engine, rows, OPENING)
        found[rows] = (await measure(engine, rows, OPENING + tokens) - opening) / tokens
    await engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="a published shape, and how many of its layers"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parity", default="fast", choices=("fast", "exact"))
    args = parser.parse_args()
    numerics = numerics_from_parity(args.parity)
    configure_cublas(numerics)
    print("| model | layers | rows | eager ms | graph ms | eager tok/s | graph tok/s | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name in args.models:
        spec = build_spec(name)
        decoder = Decoder(spec, device=args.device, dtype=torch.bfloat16, numerics=numerics)
        for parameter in decoder.parameters():
            parameter.data.normal_(std=0.02)
        weights = {key: parameter.detach() for key, parameter in decoder.named_parameters()}
        found = []
        for graphs in (False, True):
            run = ThreadExecutor("engine")
            engine = build_engine(spec, weights, graphs, numerics, max(args.batch_sizes), run)
            found.append(asyncio.run(run_engine(engine, args.batch_sizes, args.tokens)))
            run.close()
            del engine, run
            torch.cuda.empty_cache()
        for rows in args.batch_sizes:
            eager, graph = (times[rows] for times in found)
            cells = f"{eager * 1e3:.2f} | {graph * 1e3:.2f} | {rows / eager:,.0f} | {rows / graph:,.0f}"
            print(f"| {name} | {spec.num_layers} | {rows} | {cells} | {eager / graph:.1f}x |", flush=True)
        del decoder, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
