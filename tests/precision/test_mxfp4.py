"""MXFP4 against transformers' own dequantisation, and against the format's definition."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from miles.precision import dequantize
from miles.precision.dequantize import dequantize_mxfp4


def e2m1(half):
    """The value of four bits, as the format defines it."""
    sign, exponent, mantissa = -1.0 if half >> 3 else 1.0, half >> 1 & 3, half & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_byte_is_two_values_the_low_half_first():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    out = torch.empty(1, 512)
    dequantize_mxfp4(blocks, torch.full((1, 16), 128, dtype=torch.uint8), out)
    wanted = [2 * e2m1(half) for byte in range(256) for half in (byte & 15, byte >> 4)]
    assert torch.equal(out, torch.tensor([wanted]))
    assert torch.equal(out.signbit(), torch.tensor([wanted]).signbit())


def test_every_scale_is_a_power_of_two_and_the_last_is_no_number():
    blocks = torch.full((256, 1, 16), 0x22, dtype=torch.uint8)
    out = torch.empty(256, 32, dtype=torch.float64)
    dequantize_mxfp4(blocks, torch.arange(256, dtype=torch.uint8)[:, None], out)
    powers = 2.0 ** torch.arange(-127.0, 128.0, dtype=torch.float64)
    assert torch.equal(out[:255], powers[:, None].expand(255, 32))
    assert out[255].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers_which_holds_them_the_other_way_round(dtype, monkeypatch):
    monkeypatch.setattr(dequantize, "_CHUNK", 500)  # so that a matrix takes several
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 24, 5), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert theirs.shape == (3, 160, 24)
    for expert in range(3):
        out = torch.empty(24, 160, dtype=dtype)
        dequantize_mxfp4(blocks[expert], scales[expert], out)
        assert torch.equal(out.T, theirs[expert])
