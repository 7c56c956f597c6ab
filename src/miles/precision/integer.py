"""INT8 and INT4 weight quantization by groups of a row, symmetric or with a zero point, as compressed-tensors has it.

Shapes: E stacked matrices (may be absent), N rows, K columns; G groups of a row (the last may be partial), g values of
a group.

Symmetric: all of -8..7 (-128..127) is used, and a scale is the largest magnitude over 7.5 (127.5). This is what
llm-compressor publishes and SGLang and vLLM load; fake quantizers that divide by 7 and use -7..7 differ. With a zero
point: a scale is the range of the group, which always holds 0, over 15. A scale is rounded to bfloat16 before the
values are divided by it, in float32; one that would be 0 is 2**-7.

NaN and infinities make the scale of their group NaN or infinite, and so all that it dequantizes to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.precision.fp8 import divide, pad_columns

__all__ = ["decode_integers", "pack_nibbles", "quantize_asymmetric", "quantize_symmetric", "unpack_nibbles"]


def quantize_symmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Return int8 values, or bytes of two 4-bit values plus 8, and bfloat16 scales [E, N, G]."""
    x_Gg = pad_columns(weight.float(), group).unflatten(-1, (-1, group))
    half = 2 ** (bits - 1)
    scale_G = _round_scale(divide(x_Gg.abs().amax(-1), half - 0.5))
    value = _round_integer(x_Gg / scale_G.float().unsqueeze(-1), half).flatten(-2)[..., : weight.shape[-1]]
    return (value.contiguous() if bits == 8 else pack_nibbles((value + half).to(torch.uint8))), scale_G


def quantize_asymmetric(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes of two unsigned 4-bit values, bfloat16 scales and uint8 zero points, both [E, N, G]."""
    x_Gg = pad_columns(weight.float(), group).unflatten(-1, (-1, group))
    low_G, high_G = x_Gg.amin(-1).clamp(max=0), x_Gg.amax(-1).clamp(min=0)
    exact_G = divide(high_G - low_G, 15)
    # The zero point comes from the scale before it is rounded. A group of zeros has none: it takes the middle.
    zero_G = (-8 - low_G / exact_G).clamp(-8, 7).nan_to_num(nan=0.0).round()
    scale_G = _round_scale(exact_G)
    shifted = x_Gg / scale_G.float().unsqueeze(-1) + zero_G.unsqueeze(-1)
    value = _round_integer(shifted, 8).flatten(-2)[..., : weight.shape[-1]]
    return pack_nibbles((value + 8).to(torch.uint8)), scale_G, (zero_G + 8).to(torch.uint8)


def decode_integers(data: Tensor, bits: int, zero: Tensor | None) -> Tensor:
    """Return the integers in float32, before their scale.

    ``zero`` is the zero point of every value [E, N, K]; without one, 4-bit values are offset by 8.
    """
    if bits == 8:
        return data.float()
    stored = unpack_nibbles(data).float()
    return stored - (8.0 if zero is None else zero.float())


def pack_nibbles(code: Tensor) -> Tensor:
    """Two columns a byte, the even one in the low half."""
    return code[..., ::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of ``pack_nibbles``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _round_scale(scale: Tensor) -> Tensor:
    rounded = scale.to(torch.bfloat16)
    return torch.where(rounded == 0, torch.full_like(rounded, 2.0**-7), rounded)


def _round_integer(x: Tensor, half: int) -> Tensor:
    """The nearest integer, ties to even, from -half to half - 1."""
    return x.clamp(-half, half - 1).round().nan_to_num(nan=0.0).to(torch.int8)
