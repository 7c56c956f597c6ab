"""Prefill attention of long prompt chunks on one GPU: cuDNN over contiguous keys beside the paged Triton kernel.

    PYTHONPATH=src python benchmarks/bench_dense_prefill.py

bf16, heads of 128 channels. For each chunk of new tokens behind cached ones: what cuDNN takes for the chunk itself
(causal) and for the cached keys, the time of its first call, which plans attention of that size, and what the paged
kernel takes for both. TFLOP/s of the pairs of query and key that attention needs; the limit is the GPU's matmul rate.
Gathering the keys and merging the two results, which the engine does too, is not in cuDNN's time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from miles.kernels.attention.dense_prefill import attend_cudnn
from miles.kernels.attention.paged_prefill import build_prefill_tiles, prefill_attention
from miles.kernels.attention.params import PagedAttentionParams

PAGE, WIDTH = 16, 128
HEADS = ((16, 8), (32, 8))
# New tokens, and cached ones before them.
CHUNKS = ((8192, 0), (8192, 8192), (8192, 24576), (16384, 0), (16384, 16384))


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    work()
    torch.cuda.synchronize()
    spent: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spent.append(begin.elapsed_time(end))
    return statistics.median(spent)


def normal(tokens: int, heads: int) -> Tensor:
    return torch.randn(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16)


def measure_cudnn(heads: int, groups: int, count: int, keys: int, causal: bool) -> tuple[float, float]:
    """Milliseconds of the first call, and of later ones."""
    q, k, v = (x.transpose(0, 1)[None] for x in (normal(count, heads), normal(keys, groups), normal(keys, groups)))

    def work() -> object:
        return attend_cudnn(q, k, v, causal, WIDTH**-0.5)

    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), milliseconds(work)


def measure_paged(heads: int, groups: int, count: int, start: int) -> float:
    pages = -(-(start + count) // PAGE)
    q, k, v = normal(count, heads), normal(pages * PAGE, groups), normal(pages * PAGE, groups)
    table = torch.from_numpy(np.random.default_rng(0).permutation(pages).astype(np.int32))[None].cuda()
    tiles = build_prefill_tiles(np.array([start]), np.array([count]), np.array([0]), 0)
    tiles_I4, params = torch.from_numpy(tiles).cuda(), PagedAttentionParams(PAGE, WIDTH**-0.5)
    return milliseconds(lambda: prefill_attention(q, k, v, table, tiles_I4, params), 5)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| heads | new + cached tokens | cuDNN: first call, chunk, cached keys | TFLOP/s | paged kernel | TFLOP/s |")
    print("|---|---|---|--:|--:|--:|")
    for (heads, groups), (count, start) in ((h, c) for h in HEADS for c in CHUNKS):
        first, spent = measure_cudnn(heads, groups, count, count, True)
        again, cached = measure_cudnn(heads, groups, count, start, False) if start else (0.0, 0.0)
        paged = measure_paged(heads, groups, count, start)
        flops = 4 * heads * WIDTH * count * (start + count / 2)
        rates = [flops / each / 1e9 for each in (spent + cached, paged)]
        print(
            f"| {heads}, {groups} | {count:,} + {start:,} | {first + again:.0f} ms, {spent:.2f} ms, {cached:.2f} ms "
            f"| {rates[0]:.0f} | {paged:.2f} ms | {rates[1]:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
