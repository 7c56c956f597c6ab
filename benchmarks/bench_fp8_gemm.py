"""FP8 GEMM on a GPU: correctness, batch invariance over all tiles, and speed against bf16 and torch's scaled matmul.

    python benchmarks/bench_fp8_gemm.py [--sweep]

The limit of a shape is the larger of its bytes at the measured copy bandwidth and its operations at the FP8 peak
(1,979 TFLOP/s dense on an H100 or H200). ``--sweep`` times every tile that could be configured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.quantized.activation_quant import quantize_rows_fp8
from miles.kernels.quantized.fp8_gemm import Fp8Tile, fp8_gemm, list_fp8_tiles, select_fp8_tile
from miles.precision.formats import FORMATS
from miles.precision.quantize import dequantize, dequantize_activation, quantize, quantize_activation
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

# Qwen3-8B: qkv, output, gate and up, down.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 8192)
BANDWIDTH, FP8_PEAK = 4.3e12, 1979e12


def time_ms(run: Callable[[], object], repeats: int = 9) -> float:
    """The median time of a run with a cold L2 cache, as a CUDA graph would run it."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def check() -> None:
    """Compare with the dequantized reference, and the bits of all tiles with each other."""
    for name, (rows, inputs), tokens in product(("fp8", "fp8_channel"), ((512, 1024), (640, 4096)), (1, 7, 64, 300)):
        format = FORMATS[name]
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        packed = quantize(weight, format)
        activation, reference = quantize_rows_fp8(x, format), quantize_activation(x, format)
        same = torch.equal(activation.data.view(torch.uint8), reference.data.view(torch.uint8))
        same &= torch.equal(activation.scale, reference.scale)
        expected = dequantize_activation(reference).double() @ dequantize(packed, torch.float32).double().T
        outs = [fp8_gemm(activation, packed, None, tile) for tile in list_fp8_tiles()]
        error = float((outs[0].double() - expected).abs().max() / expected.abs().max())
        equal = all(torch.equal(outs[0], out) for out in outs)
        alone = fp8_gemm(quantize_rows_fp8(x[:1], format), packed)
        equal &= torch.equal(alone[0], outs[0][0])
        print(f"{name:12} {tokens:4} x {rows} x {inputs}: quantized {same}, error {error:.1e}, tiles equal {equal}")


def torch_scaled_mm(x: QuantizedActivation, weight: QuantizedTensor) -> Callable[[], Tensor]:
    """torch's own scaled matmul of the same operands."""
    if x.columns == x.data.shape[1]:
        scales = (x.scale.contiguous(), weight.scale.expand(len(weight.data), 1).t().contiguous())
        return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.data, weight.data.t(), scales[0], scales[1], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm  # pyright: ignore

    x_scale = x.scale.t().contiguous().t()
    weight_scale = weight.scale.t()

    def run() -> Tensor:
        return scaled_mm(
            x.data,
            weight.data.t(),
            x_scale,
            ScalingType.BlockWise1x128,
            weight_scale,
            ScalingType.BlockWise128x128,
            SwizzleType.NO_SWIZZLE,
            SwizzleType.NO_SWIZZLE,
            output_dtype=torch.bfloat16,
        )

    return run


def candidates(tokens: int) -> Iterable[Fp8Tile]:
    """Tiles that a sweep tries."""
    size = min(256, max(16, 1 << (tokens - 1).bit_length()))
    for rows, columns, stages in product((64, 128), sorted({size, max(16, size // 2)}), (3, 4, 6)):
        if (rows + columns) * 128 * stages <= 220_000:
            yield Fp8Tile(rows, columns, 8 if rows * columns >= 128 * 128 else 4, stages)


def attempt(run: Callable[[], object]) -> float:
    try:
        return time_ms(run)
    except Exception as error:
        print("   failed:", str(error).splitlines()[0][:140])
        return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time every tile that could be configured")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    check()
    columns = ("N", "K", "T", "limit", "bf16", "block", "cuBLAS", "channel", "torch", "quant", "tile")
    print(" ".join(f"{column:>8}" for column in columns), "(microseconds)")
    cases: list[tuple[int, int, int]] = [(*shape, tokens) for shape in SHAPES for tokens in arguments.tokens]
    for rows, inputs, tokens in cases:
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        limit = max(
            (rows * inputs + tokens * inputs + 2 * tokens * rows) / BANDWIDTH, 2 * rows * inputs * tokens / FP8_PEAK
        )
        times = [limit * 1e3, time_ms(partial(F.linear, x, weight))]
        for name in ("fp8", "fp8_channel"):
            packed, activation = quantize(weight, FORMATS[name]), quantize_rows_fp8(x, FORMATS[name])
            times.append(time_ms(partial(fp8_gemm, activation, packed)))
            times.append(attempt(torch_scaled_mm(activation, packed)))
        times.append(time_ms(partial(quantize_rows_fp8, x, FORMATS["fp8"])))
        tile = select_fp8_tile(tokens, rows, x.device)
        print(
            f"{rows:>8} {inputs:>8} {tokens:>8}", " ".join(f"{ms * 1e3:8.1f}" for ms in times), tuple(tile), flush=True
        )
        if arguments.sweep:
            packed, activation = quantize(weight, FORMATS["fp8"]), quantize_rows_fp8(x, FORMATS["fp8"])
            found = [(attempt(partial(fp8_gemm, activation, packed, None, one)), one) for one in candidates(tokens)]
            print("   ", "; ".join(f"{ms * 1e3:.1f} {tuple(one)}" for ms, one in sorted(found)[:5]), flush=True)


if __name__ == "__main__":
    main()
