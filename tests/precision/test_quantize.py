"""The torch quantizer: shapes, fused weights, rows, errors of rounding, and numbers that are none."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.precision.tensors import weights

from miles.core.errors import UsageError
from miles.precision.e8m0 import decode_e8m0, encode_e8m0
from miles.precision.formats import FORMATS, get_format
from miles.precision.integer import pack_nibbles, unpack_nibbles
from miles.precision.microscaling import E2M1_VALUES, decode_e2m1, encode_e2m1
from miles.precision.quantize import (
    dequantize,
    dequantize_activation,
    packed_layout,
    quantize,
    quantize_activation,
    row_block,
)
from miles.precision.quantized_tensor import QuantizedTensor

NAMES = list(FORMATS)
ACTIVATIONS = [name for name in NAMES if FORMATS[name].quantizes_activations]
# How far a value may be off, relative to the largest magnitude of its block: half a step, or one where it saturates.
ERROR = {"e4m3": 1 / 16, "e2m1": 1 / 5, "int8": 1 / 120, "int4": 1 / 7}


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def equal(a, b):
    return all(torch.equal(bits(x), bits(b.tensors("w")[name])) for name, x in a.tensors("w").items())


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_packed_tensors_have_the_layout_and_come_near_the_weight(name, data):
    format = get_format(name)
    stack = st.sampled_from([(), (2,)])
    weight = data.draw(weights(st.sampled_from([32, 64, 256]), st.integers(1, 5), stack))
    packed = quantize(weight, format)
    layout = packed_layout(format, weight.shape)
    tensors = packed.tensors("w")
    assert {key[1:]: (tuple(x.shape), x.dtype) for key, x in tensors.items()} == dict(layout)
    assert tuple(layout) == ("", *format.suffixes)
    assert equal(QuantizedTensor.from_tensors(format, "w", tensors, packed.row_block), packed)
    back = dequantize(packed, torch.float32)
    assert back.shape == weight.shape
    columns = format.columns or weight.shape[-1]
    wide = torch.nn.functional.pad(weight.float(), (0, -weight.shape[-1] % columns))
    largest = wide.unflatten(-1, (-1, columns)).abs().amax(-1)
    if format.rows != 1:
        largest = weight.float().abs().amax((-2, -1))[..., None, None].expand(largest.shape)
    error = (back - weight.float()).abs()
    bound = largest.repeat_interleave(columns, -1)[..., : weight.shape[-1]] * ERROR[format.element]
    # Below this, scales are subnormal or a group is small beside the matrix (NVFP4).
    floor = 1e-30 if not format.global_scale else weight.float().abs().max() * 2e-5
    assert (error <= bound + floor).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_is_its_matrices_one_after_the_other(name):
    weight = torch.randn(3, 160, 256) * torch.tensor([0.1, 1.0, 10.0])[:, None, None]
    whole = quantize(weight, get_format(name))
    for index in range(3):
        one = quantize(weight[index], get_format(name))
        taken = {key: x[index] for key, x in whole.tensors("w").items()}
        assert equal(QuantizedTensor.from_tensors(get_format(name), "w", taken, whole.row_block), one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("segments", [(128, 128, 100), (96, 32, 40)])
def test_a_fused_weight_has_the_bytes_of_its_parts(name, segments):
    format = get_format(name)
    weight = torch.randn(sum(segments), 256) * torch.logspace(-2, 1, sum(segments))[:, None]
    fused = quantize(weight, format, segments)
    shared = fused.global_scale
    parts = [quantize(part, format, global_scale=shared) for part in weight.split(list(segments))]
    assert torch.equal(bits(fused.data), bits(torch.cat([part.data for part in parts])))
    wide = torch.cat([dequantize(part, torch.float32) for part in parts])
    assert torch.equal(dequantize(fused, torch.float32), wide)
    layout = packed_layout(format, weight.shape, segments)
    assert {key[1:]: (tuple(x.shape), x.dtype) for key, x in fused.tensors("w").items()} == dict(layout)
    assert fused.row_block == row_block(format, len(weight), segments)


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_does_not_depend_on_the_dtype_that_holds_the_numbers(name):
    weight = torch.randn(8, 256).to(torch.bfloat16)
    half = (weight * 2.0**-3).to(torch.float16).float()
    assert equal(quantize(weight, get_format(name)), quantize(weight.float(), get_format(name)))
    assert equal(quantize(half.to(torch.float16), get_format(name)), quantize(half, get_format(name)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_does_not_become_finite(name, bad):
    weight = torch.randn(4, 256)
    weight[2, 70] = bad
    assert not dequantize(quantize(weight, get_format(name)), torch.float32)[2, 70].isfinite()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_activation_that_is_not_finite_spoils_its_row_and_no_other(name, bad):
    x = torch.randn(4, 256)
    x[2, 70] = bad
    wide = dequantize_activation(quantize_activation(x, get_format(name)))
    assert not wide[2, 70].isfinite()
    assert wide[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros_and_numbers_too_small_for_a_scale_become_zeros(name):
    for value in (0.0, 1e-42):
        packed = quantize(torch.full((3, 256), value), get_format(name))
        assert dequantize(packed, torch.float32).abs().max() <= 2e-42
        assert packed.scale.float().isfinite().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(data=st.data())
def test_rows_of_activations_are_quantized_alone(name, data):
    format = get_format(name)
    x = data.draw(weights(st.sampled_from([32, 96, 256])))
    whole = quantize_activation(x, format)
    assert whole.dtype == x.dtype
    assert whole.scale.dtype == torch.float32
    for index in range(len(x)):
        one = quantize_activation(x[index : index + 1], format)
        assert torch.equal(bits(one.data[0]), bits(whole.data[index]))
        assert torch.equal(one.scale[0], whole.scale[index])
    error = (dequantize_activation(whole) - x.float()).abs().amax(-1)
    assert (error <= x.float().abs().amax(-1) / 16 + 1e-30).all()


def test_activations_of_mxfp8_have_the_scales_of_weights():
    x = torch.randn(5, 96)
    weight, activation = quantize(x, get_format("mxfp8")), quantize_activation(x, get_format("mxfp8"))
    assert torch.equal(bits(weight.data), bits(activation.data))
    assert torch.equal(decode_e8m0(weight.scale), activation.scale)


@pytest.mark.parametrize(
    ("name", "columns", "multiple"),
    [("mxfp8", 48, 32), ("mxfp4", 48, 32), ("nvfp4", 40, 16), ("int4", 33, 2), ("int4_g32_asym", 31, 2)],
)
def test_input_sizes_that_a_format_cannot_hold_are_refused(name, columns, multiple):
    wanted = f"{name} needs the input size of a layer to be a multiple of {multiple}, but one has {columns}"
    with pytest.raises(UsageError, match=wanted):
        quantize(torch.zeros(2, columns), get_format(name))
    with pytest.raises(UsageError, match=wanted):
        packed_layout(get_format(name), (2, columns))


@pytest.mark.parametrize("name", ["fp8", "fp8_pow2", "int8_g32", "int4", "int4_asym", "int4_g32"])
def test_the_last_block_of_a_row_may_be_partial(name):
    weight = torch.randn(130, 150)
    packed = quantize(weight, get_format(name))
    padded = torch.nn.functional.pad(weight, (0, 106))
    wider = quantize(padded, get_format(name))
    assert torch.equal(dequantize(packed, torch.float32), dequantize(wider, torch.float32)[:, :150])
    assert packed.scale.shape[-1] == -(-150 // packed.column_block)


def test_e8m0_rounds_up_exactly():
    exact = torch.tensor([2.0**exponent for exponent in range(-126, 127)])
    assert torch.equal(decode_e8m0(encode_e8m0(exact)), exact)
    above = exact * (1 + 2.0**-23)
    assert torch.equal(decode_e8m0(encode_e8m0(above)), 2 * exact)
    edges = torch.tensor([0.0, 2.0**-149, 2.0**-127, 1.5 * 2.0**-127, float("inf"), float("nan")])
    assert encode_e8m0(edges).tolist() == [0, 0, 0, 1, 254, 255]


def test_e2m1_codes_are_the_nearest_values_with_ties_to_even():
    values = torch.tensor(E2M1_VALUES)
    assert torch.equal(encode_e2m1(values), torch.arange(16, dtype=torch.uint8))
    assert torch.equal(decode_e2m1(torch.arange(16, dtype=torch.uint8)).signbit(), values.signbit())
    middles = (values[:7] + values[1:8]) / 2
    assert encode_e2m1(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode_e2m1(torch.tensor([7.0, 1e30, -1e30])).tolist() == [7, 7, 15]
    near = torch.rand(10000) * 16 - 8
    chosen = (decode_e2m1(encode_e2m1(near)) - near).abs()
    assert torch.equal(chosen, (values[:, None] - near).abs().amin(0))


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_nibbles_are_unpacked_as_packed(codes):
    code = torch.tensor(codes, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(code)), code)
    assert pack_nibbles(code)[0] == codes[0] + 16 * codes[1]
