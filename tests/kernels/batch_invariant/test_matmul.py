"""Batch-invariant matmul: equal to the last bit in plain torch, up to rounding in the kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.tiers import examples
from torch.nn import functional as F

from miles.kernels.batch_invariant import linear_triton
from miles.kernels.batch_invariant.linear import gated_linear, linear, linear_forward
from miles.kernels.batch_invariant.linear_triton import GemmTile, launch_gemm
from miles.kernels.fused.activation import apply_activation

# Small ones for the interpreter; on a card those that are chosen from.
TILES = [GemmTile(16, 16, 32, 4, 2), GemmTile(64, 32, 16, 4, 2), GemmTile(16, 32, 32, 4, 2, tma=True, persistent=True)]
if CARD:
    TILES = linear_triton.list_tiles()


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16, 8: torch.int64}[x.element_size()])


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([257, 1000, 2049])),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([129, 515])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64] if not CARD else [torch.bfloat16]),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_a_row_is_the_same_alone_and_anywhere_among_others(rows, inputs, outputs, dtype, bias, seed, data):
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, dtype=dtype, seed=seed + 1)
    added = random(outputs, dtype=dtype, seed=seed + 2) if bias else None
    torch.set_num_threads(1)
    whole = linear(x, weight, added)
    torch.set_num_threads(2)
    row, place = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 40))
    among = 50 * random(place + data.draw(st.integers(1, 20)), inputs, dtype=dtype, seed=seed + 3)
    among[place] = x[row]
    assert torch.equal(bits(linear(among, weight, added)[place]), bits(whole[row]))
    assert torch.equal(bits(linear(x[row : row + 1], weight, added)[0]), bits(whole[row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 50, 33), (16, 64, 64), (1, 7, 3), (0, 8, 4)])
def test_a_product_is_the_right_one_rounded_once(shape, dtype):
    rows, inputs, outputs = shape
    x, weight, bias = (random(*size, dtype=dtype) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
    wanted = F.linear(x.double(), weight.double(), bias.double())
    found = linear(x, weight, bias)
    assert found.dtype == dtype and apart(found, wanted) < ROUNDING[dtype]
    wide = linear_forward(x, weight, bias, torch.float32)
    assert torch.equal(wide.to(dtype), found) and apart(wide, wanted) < 1e-5


def test_rows_may_have_more_dimensions_and_gaps():
    x, weight = random(4, 9, 16), random(5, 16)
    assert torch.equal(linear(x, weight), linear(x.reshape(-1, 16), weight).view(4, 9, 5))
    assert torch.equal(linear(x[:, 3], weight), linear(x, weight)[:, 3])


def test_gradients_are_those_of_the_product():
    x, weight, bias = (random(*size).double().requires_grad_() for size in ((5, 6), (4, 6), (4,)))
    if CARD:
        pytest.skip("double precision is the library's there")
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *given: gated_linear(*given, "silu"), (x, weight, bias))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_a_gated_product_is_the_activation_of_one_half_times_the_other(kind):
    x, weight, bias = random(21, 40), random(12, 40), random(12)
    both = F.linear(x.double(), weight.double(), bias.double())
    assert apart(gated_linear(x, weight, bias, kind), apply_activation(*both.chunk(2, -1), kind)) < 1e-5


def test_two_backwards_are_the_same():
    found = []
    for _ in range(2):
        x, weight, bias = (random(*size, seed=3).requires_grad_() for size in ((300, 65), (70, 65), (70,)))
        linear(x, weight, bias).square().sum().backward()
        found.append((x.grad, weight.grad, bias.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# -- device code ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(70, 64, 40), (3, 32, 16), (1, 16, 1)])
def test_every_tile_gives_the_product(poisoned, shape, dtype, bias):
    rows, inputs, outputs = shape
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    added = random(outputs, dtype=dtype) if bias else None
    wanted = F.linear(x.double(), weight.double(), None if added is None else added.double())
    for tile in TILES if dtype != torch.float32 or not CARD else [linear_triton.FP32_TILE]:
        wide = launch_gemm(x, weight[None], added, None, torch.float32, tile)
        assert apart(wide, wanted) < 1e-5
        assert apart(launch_gemm(x, weight[None], added, None, dtype, tile), wanted) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "swiglu_clamped"])
@pytest.mark.parametrize("inputs", [32, 50])
def test_few_rows_are_gated_by_the_product(poisoned, inputs, kind, bias):
    x, weight = random(5, inputs), random(2 * 21, inputs)
    added = random(2 * 21) if bias else None
    both = F.linear(x.double(), weight.double(), None if added is None else added.double())
    found = launch_gemm(x, weight[None], added, None, torch.float32, None if CARD else TILES[0], kind)
    assert apart(found, apply_activation(*both.chunk(2, -1), kind)) < 1e-5


@pytest.mark.skipif(not CARD, reason="needs a GPU: bits are the compiler's")
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_few_rows_are_gated_to_the_same_bits_as_many(kind):
    x, weight, bias = (random(*size, dtype=torch.bfloat16) for size in ((80, 256), (1000, 256), (1000,)))
    with torch.no_grad():
        whole = gated_linear(x, weight, bias, kind)
        assert all(torch.equal(gated_linear(x[:few], weight, bias, kind), whole[:few]) for few in (1, 17, 64))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_fill_no_tile_are_no_trouble(poisoned, dtype):
    x, weight = random(19, 50, dtype=dtype), random(21, 50, dtype=dtype)
    for tile in (tile for tile in TILES if not tile.tma):
        if dtype != torch.float32 or not CARD:
            assert (
                apart(launch_gemm(x, weight[None], None, None, torch.float32, tile), x.double() @ weight.double().T)
                < 1e-5
            )


@pytest.mark.skipif(not CARD, reason="needs a GPU: tiles differ in their bits only there")
@pytest.mark.parametrize("inputs", [40, 1000, 2560, 9728])
def test_all_tiles_give_the_same_bits(inputs):
    x, weight = random(300, inputs, dtype=torch.bfloat16), random(515, inputs, dtype=torch.bfloat16)
    wanted = launch_gemm(x, weight[None], None, None, torch.float32)
    for tile in TILES:
        assert torch.equal(launch_gemm(x, weight[None], None, None, torch.float32, tile), wanted), tile


def test_tiles_grow_with_the_rows_and_are_enough_for_the_card(monkeypatch):
    monkeypatch.setattr(linear_triton, "count_sms", lambda device: 132)
    monkeypatch.setattr(linear_triton, "is_mma_bitwise_equal", lambda device: True)

    def chosen(rows, outputs, groups=None):
        x = torch.empty(rows, 64, dtype=torch.bfloat16, device=DEVICE)
        return linear_triton.select_tile(x, x.new_empty(groups or 1, outputs, 64), groups is not None)

    monkeypatch.setattr(linear_triton, "_supports_tma", lambda x, weight: False)
    assert chosen(1, 1024).rows == 16 and chosen(1, 1024).columns == 16
    assert chosen(16, 151936).columns == 128 and chosen(64, 2560).rows == 64 and chosen(8192, 2560).rows == 128
    assert chosen(128, 1536, 128).rows == 16 and chosen(65536, 1536, 128).rows == 128
    monkeypatch.setattr(linear_triton, "is_mma_bitwise_equal", lambda device: False)
    assert chosen(1, 1024).rows == 64
    monkeypatch.setattr(linear_triton, "_supports_tma", lambda x, weight: True)
    # What was measured as the fastest.
    fastest = {(64, 1024): (64, 16), (64, 4096): (64, 32), (64, 6144): (64, 64), (64, 2560): (64, 32)}
    fastest |= {(256, 6144): (128, 128), (256, 2560): (64, 128), (256, 19456): (128, 128)}
    fastest |= {(1024, 2560): (256, 128), (1024, 6144): (128, 128), (8192, 2560): (128, 256)}
    assert {shape: chosen(*shape)[:2] for shape in fastest} == fastest
