"""FP8 weights of stock SGLang: the formats, shapes and GPUs with which it takes weight updates. No torch.

An update writes tensors by their checkpoint names over the parameters of the model. SGLang keeps those of block FP8 as
the checkpoint has them; it transposes, repacks or requantizes those of other formats when it loads them, after which an
update would write bytes of one layout over another.
"""

from __future__ import annotations

from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.parallel.tp_sharding import TpShard, compute_tp_shards
from miles.models.quantization import plan_quantization
from miles.models.spec import DecoderSpec

__all__ = ["SGLANG_FORMATS", "find_device_problem", "find_shape_problem", "requantizes_blocks"]

SGLANG_FORMATS = ("fp8", "fp8_pow2")
"""Formats whose weights stock SGLang can be sent: E4M3 with a scale for 128 x 128 values."""

_BLOCK = 128
_FIRST_FP8 = (8, 9)
_FIRST_UE8M0 = (10, 0)


def find_shape_problem(spec: DecoderSpec, ranks: int) -> str | None:
    """Return which quantized weight an SGLang server of ``ranks`` GPUs cannot hold, as the start of a sentence.

    Inputs, the parts of fused layers, and the shards of a rank must be whole blocks.
    """
    pieces = build_param_map(spec)
    shards = compute_tp_shards(spec) if ranks > 1 else {}
    for name, quantized in plan_quantization(spec).items():
        if any(len(piece.shape) == 3 for piece in pieces[name]):
            return f"{pieces[name][0].hf_name} is one tensor of all experts, which SGLang does not load in FP8"
        columns = param_shape(pieces[name])[-1]
        if columns % _BLOCK:
            return f"{pieces[name][0].hf_name} has {columns} input channels, which are not whole blocks of {_BLOCK}"
        fused = len(quantized.segments) > 1
        parts = {p.hf_name: p.stop - p.start for p in pieces[name] if p.expert in (None, 0)} if fused else {}
        for hf_name, rows in parts.items():
            if rows % _BLOCK:
                return f"{hf_name} has {rows} rows, which are not whole blocks of {_BLOCK} as SGLang fuses them"
        size = None if ranks == 1 else _find_divided_size(shards[name], param_shape(pieces[name]), ranks)
        if size is not None:
            return f"each of {ranks} GPUs would have {size} of {pieces[name][0].hf_name}, not whole blocks of {_BLOCK}"
    return None


def _find_divided_size(shard: TpShard, shape: tuple[int, ...], ranks: int) -> str | None:
    """The rows or columns of a rank that are not whole blocks."""
    kind = "rows" if shard.dim == len(shape) - 2 else "columns"
    for segment in shard.segments:
        size = segment.units_per_rank(ranks) * segment.rows
        if size % _BLOCK:
            return f"{size} {kind}"
    return None


def find_device_problem(kind: str, capability: tuple[int, int] | None) -> str | None:
    """Return why SGLang takes no FP8 updates on a device of this kind and compute capability."""
    if kind == "rocm":
        return "SGLang converts FP8 weights to another encoding on ROCm when it loads them, and takes no updates then"
    if capability is not None and capability < _FIRST_FP8:
        return (
            "SGLang repacks FP8 weights on GPUs without FP8 tensor cores when it loads them, and takes no updates then"
        )
    return None


def requantizes_blocks(capability: tuple[int, int] | None) -> bool:
    """Whether SGLang's default kernels requantize block FP8 on this GPU, so that others must be chosen."""
    return capability is not None and capability >= _FIRST_UE8M0
