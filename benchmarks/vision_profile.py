"""Where the time of a vision tower goes: pieces of a block, implementations of its attention, and the top CUDA kernels.

The ``profile`` part of ``bench_vision_gpu.py``.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.attention import bidirectional_triton
from miles.kernels.attention.bidirectional import Segments, bidirectional_attention
from miles.kernels.attention.varlen import load_varlen_kernel
from miles.models.vision.encoder import activate
from miles.models.vision.patches import read_grid

TOP_KERNELS = 15
# Keys, warps and stages of the Triton kernel's tile that are compared.
TILES = ((64, 8, 3), (64, 8, 2), (64, 8, 4), (128, 8, 2), (128, 8, 3), (64, 4, 3), (32, 8, 4))


def measure_us(what: Callable[[], Any], device: str, times: int = 10) -> float:
    """Median microseconds of a call, on the device's clock, after two to warm up."""
    if device == "cpu":
        spent: list[float] = []
        for _ in range(3):
            started = time.perf_counter()
            what()
            spent.append(time.perf_counter() - started)
        return statistics.median(spent) * 1e6
    spent = []
    for number in range(2 + times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        what()
        end.record()
        end.synchronize()
        if number >= 2:
            spent.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(spent)


def profile_tower(tower: Any, images: Sequence[Any], device: str) -> dict[str, Any]:
    """The pieces, the implementations of attention, and the kernels of a forward."""
    with torch.inference_mode():
        inputs = build_block_inputs(tower, images)
        found = {
            "images": len(images),
            "layers": len(tower.blocks),
            "tower_us": measure_us(lambda: tower(images), device),
            "pieces": measure_pieces(tower, *inputs, device),
            "attention": compare_attention(tower, *inputs, device),
            "kernels": list_kernels(lambda: tower(images), device),
        }
    found["attention_backward"] = compare_attention_backward(tower, *inputs, device)
    return found


def build_block_inputs(tower: Any, images: Sequence[Any]) -> tuple[Tensor, Tensor, Segments]:
    """Hidden states of noise, and the rotations and segments of images."""
    spec, weight = tower.spec.tower, tower.patch_embed.weight
    grids = [read_grid(image, tower.spec) for image in images]
    lengths = [grid.rows * grid.columns for grid in grids for _ in range(grid.frames)]
    x_PD = torch.randn(sum(lengths), spec.hidden_size, device=weight.device).to(weight.dtype)
    return x_PD, tower._cos_sin(spec.rope_theta, grids, weight.device), Segments(lengths, weight.device)


def measure_pieces(
    tower: Any, x_PD: Tensor, cos_sin_P2d: Tensor, segments: Segments, device: str
) -> dict[str, dict[str, float]]:
    """Microseconds of each piece of a block of all images, and TFLOP/s of those with matmuls."""
    block, merge = tower.blocks[0], tower.spec.merge_size**2
    attention, mlp, patches, width = block.attention, block.mlp, len(x_PD), x_PD.shape[1]
    numerics = attention.numerics
    qkv_P3Hd = attention.qkv(x_PD).unflatten(-1, (3, -1, attention.head_dim))
    q, k, v = attention.norm_and_rotate(qkv_P3Hd, cos_sin_P2d)
    inner_PI, square_FSD = mlp.up(x_PD), x_PD.unflatten(0, (-1, merge))
    gemm, merged = 2.0 * patches * width, width * merge
    attended = 4.0 * width * sum(length**2 for length in segments.lengths)
    merger = 2.0 * len(square_FSD) * (merged**2 + merged * tower.merger.down.out_features)
    values_PC = torch.randn(patches, tower.spec.tower.patch_values, device=x_PD.device).to(x_PD.dtype)
    pieces: dict[str, tuple[Callable[[], Any], float]] = {
        "attention norm": (lambda: block.attention_norm(x_PD), 0),
        "qkv GEMM": (lambda: attention.qkv(x_PD), gemm * 3 * width),
        "rotary of q and k": (lambda: attention.norm_and_rotate(qkv_P3Hd, cos_sin_P2d), 0),
        "attention": (
            lambda: bidirectional_attention(q, k, v, segments, attention.scale, numerics=numerics),
            attended,
        ),
        "output GEMM": (lambda: attention.output(x_PD), gemm * width),
        "add and MLP norm": (lambda: block.mlp_norm.add_norm(x_PD, x_PD), 0),
        "up GEMM": (lambda: mlp.up(x_PD), gemm * inner_PI.shape[1]),
        "GELU by itself": (lambda: activate(inner_PI, mlp.activation), 0),
        "up GEMM and GELU, as used": (lambda: mlp.expand(x_PD), gemm * inner_PI.shape[1]),
        "down GEMM": (lambda: mlp.down(inner_PI), gemm * inner_PI.shape[1]),
        "add": (lambda: x_PD + x_PD, 0),
        "whole block": (
            lambda: block(x_PD, cos_sin_P2d, segments),
            gemm * (4 * width + 2 * inner_PI.shape[1]) + attended,
        ),
        "patch embedding (once)": (lambda: tower.patch_embed(values_PC), gemm * values_PC.shape[1]),
        "merger (once, and per deepstack layer)": (lambda: tower.merger(square_FSD), merger),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (what, flops) in pieces.items():
        spent = measure_us(what, device)
        found[name] = {"us": spent, "tflops": flops / spent / 1e6}
    return found


def make_attention_inputs(tower: Any, x_PD: Tensor, cos_sin_P2d: Tensor) -> tuple[tuple[Tensor, ...], float]:
    attention = tower.blocks[0].attention
    return attention.project(x_PD, cos_sin_P2d), attention.scale


def list_attention(segments: Segments, scale: float, head_dim: int, device: str) -> dict[str, Callable[..., Tensor]]:
    """Implementations of attention within segments of one length, by name."""
    count, longest = len(segments.lengths), segments.longest

    def dense(backend: SDPBackend, width: int) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            padded = (F.pad(x, (0, width - head_dim)) if width > head_dim else x for x in (q, k, v))
            q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in padded)
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(q, k, v, scale=scale)
            return out.transpose(1, 2).flatten(0, 1)[..., :head_dim]

        return attend

    if device == "cpu":
        return {"SDPA": dense(SDPBackend.MATH, head_dim)}

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = segments.cu_seqlens
        return load_varlen_kernel()[0](q, k, v, ends, ends, longest, longest, scale=scale)

    found: dict[str, Callable[..., Tensor]] = {"torch varlen (FlashAttention 2)": varlen}
    for width in sorted({head_dim, -(-head_dim // 16) * 16, 96, 128}):
        if width >= head_dim:
            found[f"cuDNN, {width} channels"] = dense(SDPBackend.CUDNN_ATTENTION, width)
    found["SDPA flash"] = dense(SDPBackend.FLASH_ATTENTION, head_dim)
    return found


def compare_attention(
    tower: Any, x_PD: Tensor, cos_sin_P2d: Tensor, segments: Segments, device: str
) -> dict[str, dict[str, Any]]:
    """Microseconds, TFLOP/s and the difference from the first of each implementation, or the error that it gives."""
    qkv, scale = make_attention_inputs(tower, x_PD, cos_sin_P2d)
    head_dim = qkv[0].shape[-1]
    flops = 4.0 * x_PD.shape[1] * sum(length**2 for length in segments.lengths)
    kinds = list_attention(segments, scale, head_dim, device)
    if device == "cuda":
        for tile in TILES:
            kinds[f"Triton, tile {tile}"] = with_tile(tile, segments, scale)
    found: dict[str, dict[str, Any]] = {}
    expected: Tensor | None = None
    for name, attend in kinds.items():
        try:
            out = attend(*qkv).float()
            expected = out if expected is None else expected
            spent = measure_us(lambda attend=attend: attend(*qkv), device)
            apart = float((out - expected).norm() / expected.norm())
            found[name] = {"us": spent, "tflops": flops / spent / 1e6, "apart": apart}
        except Exception as error:  # a kernel that the GPU or this release does not have
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    return found


def with_tile(tile: tuple[int, int, int], segments: Segments, scale: float) -> Callable[..., Tensor]:
    """The Triton kernel with another tile."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = bidirectional_triton.TILE_NARROW, bidirectional_triton.TILE_WIDE
        bidirectional_triton.TILE_NARROW = bidirectional_triton.TILE_WIDE = tile
        try:
            return bidirectional_triton.attend_segments(q, k, v, segments.tiles, scale)
        finally:
            bidirectional_triton.TILE_NARROW, bidirectional_triton.TILE_WIDE = kept

    return attend


def compare_attention_backward(
    tower: Any, x_PD: Tensor, cos_sin_P2d: Tensor, segments: Segments, device: str
) -> dict[str, dict[str, Any]]:
    """Microseconds and TFLOP/s of forward and backward of the implementations that have one."""
    with torch.no_grad():
        qkv, scale = make_attention_inputs(tower, x_PD.clone(), cos_sin_P2d.clone())
    qkv = tuple(x.clone().requires_grad_() for x in qkv)
    flops = 3.5 * 4.0 * x_PD.shape[1] * sum(length**2 for length in segments.lengths)
    found: dict[str, dict[str, Any]] = {}
    for name, attend in list_attention(segments, scale, qkv[0].shape[-1], device).items():
        try:
            spent = measure_us(lambda attend=attend: attend(*qkv).sum().backward(), device, times=5)
            found[name] = {"us": spent, "tflops": flops / spent / 1e6}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    return found


def list_kernels(what: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """The CUDA kernels with the most time of a call, with their share; on a CPU the operators."""
    from torch.profiler import ProfilerActivity, profile

    what()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        what()
        if device == "cuda":
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events() or ():
        if device == "cpu" or event.device_type.name == "CUDA":
            spent[event.name].append(event.time_range.elapsed_us() if device == "cuda" else event.self_cpu_time_total)
    whole = sum(map(sum, spent.values()))
    top = sorted(spent.items(), key=lambda item: -sum(item[1]))[:TOP_KERNELS]
    return [{"name": name, "calls": len(times), "us": sum(times), "share": sum(times) / whole} for name, times in top]


def describe_profile(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['images']} images: {found['tower_us'] / 1e3:.2f} ms, {found['layers']} blocks; a block:"]
    for title, rows in {
        "": found["pieces"],
        "attention, forward:": found["attention"],
        "attention, forward and backward:": found["attention_backward"],
    }.items():
        lines += [title] if title else []
        for name, row in rows.items():
            if "error" in row:
                lines.append(f"  {name:40} {row['error']}")
                continue
            rate = f"{row['tflops']:8.0f} TFLOP/s" if row["tflops"] else ""
            apart = f"  apart {row['apart']:.1e}" if "apart" in row else ""
            lines.append(f"  {name:40} {row['us']:9.1f} us{rate}{apart}")
    lines.append("kernels of a forward:")
    lines += [
        f"  {row['share']:4.0%} {row['us'] / 1e3:8.2f} ms {row['calls']:5d} x {row['name'][:90]}"
        for row in found["kernels"]
    ]
    return lines
