"""FP8 blocks against transformers' own dequantisation, and against the format's definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from miles.precision.dequantize import dequantize_blocks

GENERATOR = torch.Generator().manual_seed(0)


def weight_and_scale(rows, columns, block):
    weight = torch.randn(rows, columns, generator=GENERATOR).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=GENERATOR) + 0.01
    return weight, scale


def e4m3(byte):
    """The value of a byte, as the format defines it."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_byte_means_what_the_format_says():
    bytes_1R = torch.arange(256, dtype=torch.uint8)[None].view(torch.float8_e4m3fn)
    out = torch.empty(1, 256)
    dequantize_blocks(bytes_1R, torch.tensor([[0.5, 2.0]]), (128, 128), out)
    wanted = torch.tensor([[e4m3(byte) * (0.5 if byte < 128 else 2.0) for byte in range(256)]])
    assert torch.equal(out.nan_to_num(1e9), wanted.nan_to_num(1e9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_whole_blocks_are_what_transformers_makes_of_them(dtype, scales):
    weight, scale = weight_and_scale(256, 384, (128, 128))
    scale = scale.to(scales)
    out = torch.empty(256, 384, dtype=dtype)
    dequantize_blocks(weight, scale, (128, 128), out)
    assert torch.equal(out, Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype))


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    block=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_rows_of_a_matrix_of_any_shape_are_values_times_their_blocks_scale(rows, columns, block, ends):
    weight, scale = weight_and_scale(rows, columns, block)
    wide = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    first, last = sorted(round(end * rows) for end in ends)
    out = torch.empty(columns, last - first).T  # wherever it lies in memory
    kept = scale[first // block[0] : -(-last // block[0])]
    dequantize_blocks(weight[first:last], kept, block, out, first=first)
    assert torch.equal(out, weight[first:last].float() * wide[first:last])
