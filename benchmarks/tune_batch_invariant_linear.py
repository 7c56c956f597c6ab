"""Tile tuning of batch-invariant GEMMs on a GPU, by number of rows: the source of the tile tables.

    PYTHONPATH=src python benchmarks/tune_batch_invariant_linear.py

Prints the five fastest tiles of each GEMM, in us, and beside them cuBLAS without split-K, which gives the same bits at
most shapes.
"""

from __future__ import annotations

import torch
from bench_batch_invariant_linear import CACHE, LAYERS, normal, seconds, unsplit
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from miles.kernels.batch_invariant.linear_triton import GemmTile, launch_gemm


def short(tile: GemmTile) -> str:
    mark = "c" * tile.tma + "s" * tile.persistent
    return f"{tile.rows}x{tile.columns}x{tile.depth}/{tile.warps}w{tile.stages}s{mark}"


# By the most rows they are tried for.
TRIED: dict[int, tuple[GemmTile, ...]] = {
    16: (
        GemmTile(16, 16, 256, 2, 5),
        GemmTile(16, 32, 128, 4, 6),
        GemmTile(16, 32, 256, 4, 4),
        GemmTile(16, 64, 128, 4, 5),
        GemmTile(16, 64, 256, 4, 3),
        GemmTile(16, 128, 128, 4, 4),
    ),
    64: (
        GemmTile(64, 16, 128, 4, 6, True),
        GemmTile(64, 16, 256, 4, 5, True),
        GemmTile(64, 32, 128, 4, 6, True),
        GemmTile(64, 32, 256, 4, 4, True),
        GemmTile(64, 64, 128, 4, 5, True),
        GemmTile(64, 128, 128, 4, 4, True),
        GemmTile(64, 32, 128, 4, 4),
        GemmTile(64, 64, 64, 4, 6),
    ),
    256: (
        GemmTile(64, 32, 128, 4, 6, True),
        GemmTile(64, 64, 128, 4, 5, True),
        GemmTile(128, 64, 64, 4, 6, True),
        GemmTile(128, 64, 128, 4, 4, True),
        GemmTile(64, 128, 64, 4, 6, True),
        GemmTile(128, 128, 64, 8, 5, True),
        GemmTile(256, 32, 64, 8, 5, True),
        GemmTile(256, 64, 64, 8, 5, True),
    ),
    1024: (
        GemmTile(128, 128, 64, 8, 5, True),
        GemmTile(128, 128, 128, 8, 3, True),
        GemmTile(128, 64, 128, 4, 4, True),
        GemmTile(256, 64, 64, 8, 5, True),
        GemmTile(128, 256, 64, 8, 4, True),
        GemmTile(256, 128, 64, 8, 4, True),
        GemmTile(64, 256, 64, 4, 5, True),
        GemmTile(128, 128, 64, 4, 5, True),
    ),
    8192: (
        GemmTile(128, 256, 64, 8, 3, True, True),
        GemmTile(128, 256, 64, 8, 4, True, True),
        GemmTile(128, 256, 64, 8, 4, True),
        GemmTile(256, 128, 64, 8, 4, True),
        GemmTile(256, 128, 64, 8, 3, True, True),
    ),
}


def main() -> None:
    """The five fastest tiles of each product, of those that may be chosen for so many rows."""
    torch.manual_seed(0)
    for name, (inputs, outputs) in LAYERS.items():
        copies = max(1, min(24, CACHE // (2 * inputs * outputs)))
        weights = [normal(outputs, inputs, scale=0.05) for _ in range(copies)]
        for count, tiles in TRIED.items():
            x_TK = normal(count, inputs)
            found: list[tuple[float, str]] = []
            for tile in (*tiles, *(TRIED[64] if count == 16 else ())):

                def run(index: int, tile: GemmTile = tile, x: Tensor = x_TK, w: list[Tensor] = weights) -> object:
                    return launch_gemm(x, w[index][None], None, None, torch.bfloat16, tile)

                try:
                    found.append((1e6 * seconds(run, copies, 0.004), short(tile)))
                except OutOfResources:
                    found.append((float("inf"), short(tile)))
            with unsplit():
                library = 1e6 * seconds(lambda i, x=x_TK, w=weights: F.linear(x, w[i]), copies, 0.004)
            print(f"{name:12} {count:5} unsplit {library:.1f} ", *(f"{t} {us:.1f} " for us, t in sorted(found)[:5]))


if __name__ == "__main__":
    main()
