"""Tiles of the FP8 experts' kernel: the time of each candidate for both GEMMs, by tokens per batch, on one GPU.

    PYTHONPATH=src python benchmarks/tune_fp8_moe.py [--tokens 16 64 256 2048] [--experts 128 8 2048 768]

Random weights of Qwen3-30B-A3B's expert layer. The limit is to read each chosen expert once, at the rate of a device
copy. Candidates are compiled by several processes first, and then measured one by one.
"""

from __future__ import annotations

import argparse
import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

Shape = tuple[int, int, int, int]


def list_candidates(tokens: int, shape: Shape) -> list[tuple[str, Any]]:
    """The GEMM that a candidate is for, and the tiles."""
    from miles.kernels.quantized.fp8_moe import Fp8ExpertTile, Fp8ExpertTiles, select_expert_tiles

    experts, per_token, _, _ = shape
    now = select_expert_tiles(tokens * per_token / experts)
    heights = {16: (16,), 32: (16, 32), 64: (32, 64), 128: (64, 128)}[now.tokens]
    found: list[tuple[str, Any]] = [("now", now)]
    for height, warps, stages in itertools.product(heights, (4, 8), (2, 3, 4, 5)):
        if height * 4 >= stages * stages:
            found.append(("first", Fp8ExpertTiles(height, Fp8ExpertTile(128, warps, stages), now.down)))
    for height, rows, warps, stages in itertools.product(heights, (64, 128), (4, 8), (3, 4, 6)):
        if rows == 128 or warps == 4:
            found.append(("down", Fp8ExpertTiles(height, now.first, Fp8ExpertTile(rows, warps, stages))))
    return found


class Layer:
    """One layer's experts, and a batch of tokens."""

    def __init__(self, tokens: int, shape: Shape) -> None:
        import torch

        from miles.precision.formats import get_format
        from miles.precision.quantized_tensor import QuantizedTensor

        experts, per_token, width, size = shape
        torch.manual_seed(0)
        form = get_format("fp8")

        def pack(rows: int, columns: int) -> Any:
            data = torch.randn(experts, rows, columns, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
            scale = torch.rand(experts, rows // 128, columns // 128, device="cuda") / 64
            return QuantizedTensor(form, data, scale, 128)

        self.first, self.down = pack(2 * size, width), pack(width, size)
        self.x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(tokens, experts, device="cuda")
        self.weights_Tk, self.experts_Tk = scores.topk(per_token)

    def run(self) -> Any:
        from miles.kernels.quantized.activation_quant import quantize_rows_fp8
        from miles.kernels.quantized.fp8_moe import fp8_moe

        x = quantize_rows_fp8(self.x_TD, self.first.format)
        return fp8_moe(x, self.weights_Tk, self.experts_Tk, self.first, self.down, "silu")


def use_tiles(tiles: Any) -> None:
    from miles.kernels.quantized import fp8_moe as kernel

    kernel.TILES = ((float("inf"), tiles),)
    kernel.select_expert_tiles.cache_clear()


def compile_one(task: tuple[int, Shape, Any]) -> str | None:
    tokens, shape, tiles = task
    import torch

    try:
        small = (16, min(shape[1], 8), *shape[2:])
        use_tiles(tiles)
        Layer(min(tokens, 64), small).run()
        torch.cuda.synchronize()
    except Exception as error:  # a tile that does not fit is no candidate
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def measure(layer: Layer, tiles: Any, reference: Any) -> dict[str, float]:
    """Microseconds of each kernel launch, first and down, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    use_tiles(tiles)
    layer.run()
    out = layer.run()
    if reference is not None:
        assert torch.equal(out, reference), tiles
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(8):
            layer.run()
        torch.cuda.synchronize()
    events = sorted((e for e in profiler.events() or () if "fp8_expert" in e.name), key=lambda e: e.time_range.start)
    times = [event.device_time for event in events]
    return {"first": sorted(times[::2])[4], "down": sorted(times[1::2])[4]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 2048])
    parser.add_argument("--experts", type=int, nargs=4, default=[128, 8, 2048, 768], help="E, k, hidden, intermediate")
    args = parser.parse_args()
    shape: Shape = tuple(args.experts)
    by_tokens = {tokens: list_candidates(tokens, shape) for tokens in args.tokens}
    tasks = {(tokens, shape, tiles) for tokens, found in by_tokens.items() for _, tiles in found}
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        failed = {task[2]: why for task, why in zip(tasks, pool.map(compile_one, tasks), strict=True) if why}
    for tiles, why in failed.items():
        print("does not compile:", tiles, why)
    for tokens, found in by_tokens.items():
        layer = Layer(tokens, shape)
        read = {"first": layer.first.data.numel(), "down": layer.down.data.numel()}
        chosen = len(layer.experts_Tk.unique()) / shape[0]
        reference, rows = None, []
        for which, tiles in found:
            if tiles in failed:
                continue
            times = measure(layer, tiles, reference)
            if which == "now":
                reference = layer.run()
            for name in ("first", "down") if which == "now" else (which,):
                rate = read[name] * chosen / times[name] / 1e6
                rows.append((name, times[name], rate, "now" if which == "now" else "", tiles))
        for name in ("first", "down"):
            best = sorted((row for row in rows if row[0] == name), key=lambda row: row[1])
            for row in [*best[:4], *(each for each in best[4:] if each[3])]:
                tile = getattr(row[4], name)
                print(f"{tokens:5} {name:5} {row[1]:8.1f} us {row[2]:5.2f} TB/s m={row[4].tokens} {tile} {row[3]}")


if __name__ == "__main__":
    main()
