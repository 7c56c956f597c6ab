"""Weight-only quantized linear layers on a GPU: correctness, batch invariance, and speed against bf16.

    python benchmarks/bench_quantized_linear.py [--sweep] [--formats int4 mxfp4] [--rows 1 16]

Shapes are the layers of Qwen3-8B. A time is that of one launch in a CUDA graph of many, each with a weight of its own,
so that no weight is in the L2 cache and launches overlap as in a decode step. GB/s are of the packed bytes and are
compared with the bandwidth of a copy on the same GPU. ``--sweep`` times other tiles of the GEMV and the GEMM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.fused import gemv
from miles.kernels.numerics import FAST
from miles.kernels.quantized.packed_weight import dequantize_weight, is_weight_only
from miles.kernels.quantized.weight_only import gated_weight_only_linear, weight_only_linear, weight_only_moe
from miles.kernels.quantized.weight_only_gemm import WeightOnlyTile, list_weight_only_tiles, weight_only_gemm
from miles.kernels.quantized.weight_only_gemv import GemvTile, weight_only_gemv
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, quantize
from miles.precision.quantized_tensor import QuantizedTensor

NAMES = [name for name, format in FORMATS.items() if is_weight_only(format)]
# Qwen3-8B: outputs and inputs of qkv, output, gate and up, down.
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
# Bytes of all weights of a timed graph: several times the L2 cache.
_COLD_BYTES = 400 << 20
# The most that an output may differ from the float64 product, relative to the largest.
_TOLERANCE = 1.2e-2


def time_us(runs: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """The median time of one of ``runs``, which follow each other in a CUDA graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2] / len(runs) * 1e3


def packed_bytes(packed: QuantizedTensor) -> int:
    return sum(x.numel() * x.itemsize for x in packed.tensors("w").values())


def copies_of(packed: QuantizedTensor) -> list[QuantizedTensor]:
    count = min(64, max(2, _COLD_BYTES // packed_bytes(packed)))
    return [packed] + [packed._replace(data=packed.data.clone(), scale=packed.scale.clone()) for _ in range(count - 1)]


def measure_bandwidth() -> float:
    """Bytes per second of reading and writing in a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_us([lambda: target.copy_(source)]) * 1e-6)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    return float(error) if out.isfinite().all() else float("inf")


def check_format(name: str) -> bool:
    """Compare with the dequantized weight in float64, and the dequantization kernel with the reference."""
    worst, exact = 0.0, True
    for (outputs, inputs), rows in product(((640, 1024), (384, 2112), (256, 12288)), (1, 5, 64, 200)):
        packed = quantize(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16), FORMATS[name])
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
        wanted = x.double() @ dequantize(packed, torch.float64).T + bias.double()
        worst = max(worst, relative_error(weight_only_linear(x, packed, bias, numerics=FAST), wanted))
        gate, up = wanted.chunk(2, -1)
        gated = gated_weight_only_linear(x, packed, bias, "silu", numerics=FAST)
        worst = max(worst, relative_error(gated, F.silu(gate) * up))
        exact &= torch.equal(dequantize_weight(packed, torch.bfloat16), dequantize(packed, torch.bfloat16))
        for tile in list_weight_only_tiles():
            worst = max(worst, relative_error(weight_only_gemm(x, packed, bias, tile=tile), wanted))
    worst = max(worst, check_experts(name))
    passed = worst < _TOLERANCE and exact
    print(f"{name:14} error {worst:.1e}, bits of dequantize {exact}{'' if passed else '  FAILED'}")
    return passed


def check_experts(name: str) -> float:
    """The error of a small MoE layer, for one token and for many."""
    first = quantize(torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16) / 16, FORMATS[name])
    down = quantize(torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16) / 16, FORMATS[name])
    wide_first, wide_down = dequantize(first, torch.float64), dequantize(down, torch.float64)
    worst = 0.0
    for tokens in (1, 40):
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        experts = torch.rand(tokens, 8, device="cuda").topk(2).indices
        weights = torch.rand(tokens, 2, device="cuda").softmax(-1)
        gate, up = torch.einsum("td,tkfd->tkf", x.double(), wide_first[experts]).chunk(2, -1)
        rows = torch.einsum("tki,tkdi->tkd", F.silu(gate) * up, wide_down[experts])
        out = weight_only_moe(x, weights, experts, first, down, "silu")
        worst = max(worst, relative_error(out, (rows * weights.double().unsqueeze(-1)).sum(1)))
    return worst


def time_wide(x: Tensor, weight: Tensor) -> float:
    """A bf16 layer: the GEMV of the engine for one row, else torch."""
    copies = [weight] + [weight.clone() for _ in range(max(1, _COLD_BYTES // (2 * weight.numel())))]
    return time_us([partial(gemv.linear, x, w, numerics=FAST) for w in copies])


def dequantize_and_multiply(x: Tensor, weight: QuantizedTensor) -> Tensor:
    return F.linear(x, dequantize_weight(weight, x.dtype))


def time_table(names: Sequence[str], rows: Sequence[int]) -> None:
    bandwidth = measure_bandwidth()
    print(f"\ncopy bandwidth {bandwidth / 1e9:.0f} GB/s; times in us, speedup over bf16, share of the bandwidth")
    print(f"{'layer':8} {'rows':>5} {'bf16':>8}  " + "  ".join(f"{name:>28}" for name in names))
    totals: dict[tuple[int, str], float] = {}
    for (layer, (outputs, inputs)), count in product(SHAPES.items(), rows):
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16)
        wide = time_wide(x, weight)
        totals[count, "bf16"] = totals.get((count, "bf16"), 0.0) + wide
        cells: list[str] = []
        for name in names:
            packed = copies_of(quantize(weight, FORMATS[name]))
            taken = time_us([partial(weight_only_linear, x, w, None, numerics=FAST) for w in packed])
            totals[count, name] = totals.get((count, name), 0.0) + taken
            share = packed_bytes(packed[0]) / (taken * 1e-6) / bandwidth
            if count > 1:
                apart = time_us([partial(dequantize_and_multiply, x, w) for w in packed])
                cells.append(f"{taken:8.1f} {wide / taken:5.2f}x, apart {apart:6.1f}")
            else:
                cells.append(f"{taken:8.1f} {wide / taken:5.2f}x {share:4.0%}")
        print(f"{layer:8} {count:5} {wide:8.1f}  " + "  ".join(f"{cell:>28}" for cell in cells), flush=True)
    for count in rows:
        wide = totals[count, "bf16"]
        cells = [f"{totals[count, name]:8.1f} {wide / totals[count, name]:5.2f}x" for name in names]
        print(f"{'all':8} {count:5} {wide:8.1f}  " + "  ".join(f"{cell:>28}" for cell in cells))


def sweep(names: Sequence[str], rows: Sequence[int]) -> None:
    """The fastest tiles of each layer."""
    gemv_tiles = [
        GemvTile(rows, warps, resident, min(255, 65536 // (32 * warps * resident) // 8 * 8))
        for rows, warps, resident in product((1, 2, 4, 8), (2, 4, 8), (1, 2, 4, 6))
        if warps * resident <= 16
    ]
    gemm_tiles = [
        WeightOnlyTile(*tile) for tile in product((16, 32, 64, 128), (16, 32, 64, 128), (64, 128), (4, 8), (3, 4))
    ]
    for name, (layer, (outputs, inputs)), count in product(names, SHAPES.items(), rows):
        x = torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16)
        packed = copies_of(quantize(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16), FORMATS[name]))
        found: list[tuple[float, object]] = []
        tiles = gemv_tiles if count == 1 else [tile for tile in gemm_tiles if tile.tokens <= max(16, count)]
        for tile in tiles:
            try:
                run: Callable[..., Tensor] = weight_only_gemv if isinstance(tile, GemvTile) else weight_only_gemm
                found.append((time_us([partial(run, x, w, tile=tile) for w in packed]), tile))
            except Exception as error:  # a tile that does not fit the GPU
                print(f"  {tile}: {type(error).__name__}", file=sys.stderr)
        for taken, tile in sorted(found, key=lambda each: each[0])[:4]:
            print(f"{name:14} {layer:8} {count:4} rows {taken:8.1f} us  {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other tiles")
    parser.add_argument("--formats", nargs="+", default=NAMES, choices=NAMES, help="formats to measure")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256], help="rows of the input")
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        passed = [options.sweep or check_format(name) for name in options.formats]
        if options.sweep:
            sweep(options.formats, options.rows)
        else:
            time_table(options.formats, options.rows)
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
