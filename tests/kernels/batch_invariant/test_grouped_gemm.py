"""Products of groups: each row as if its weight were the only one, and a token's sum in the order of its choices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.tiers import examples

from miles.kernels.batch_invariant import linear_triton
from miles.kernels.batch_invariant.grouped_gemm import combine_choices, combine_rows, grouped_linear
from miles.kernels.batch_invariant.grouped_gemm_triton import launch_combine
from miles.kernels.batch_invariant.linear import linear
from miles.kernels.batch_invariant.linear_triton import GemmTile, launch_gemm
from miles.kernels.moe import grouped_gemm as fast
from miles.kernels.moe.grouped_gemm import sort_rows_by_group

TILES = [GemmTile(16, 16, 32, 4, 2), GemmTile(16, 32, 32, 4, 2, tma=True, persistent=True), GemmTile(64, 32, 16, 4, 2)]
if CARD:
    TILES = linear_triton.list_tiles()
HALF = torch.bfloat16


def routed(tokens, groups, per_token, seed, skip=()):
    """Rows of tokens sorted by groups, none of them ``skip``."""
    chances = torch.rand(tokens, groups, generator=torch.Generator().manual_seed(seed))
    chances[:, list(skip)] = -1
    return sort_rows_by_group(chances.topk(per_token, -1).indices.to(DEVICE), groups)


@settings(max_examples=examples(30), deadline=None)
@given(
    tokens=st.integers(0, 40),
    groups=st.integers(3, 9),
    per_token=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, HALF] if not CARD else [HALF]),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_a_row_is_what_its_groups_weight_makes_of_it_alone(tokens, groups, per_token, dtype, bias, seed):
    rows = routed(tokens, groups, per_token, seed, skip=[0])
    x, weight = (
        random(tokens * per_token, 21, dtype=dtype, seed=seed),
        random(groups, 18, 21, dtype=dtype, seed=seed + 1),
    )
    added = random(groups, 18, dtype=dtype, seed=seed + 2) if bias else None
    found = grouped_linear(x, weight, rows, added)
    for row, group in enumerate(rows.group_R.tolist()):
        alone = linear(x[row : row + 1], weight[group], None if added is None else added[group])[0]
        assert torch.equal(found[row], alone)


def test_gradients_are_those_of_the_plain_product():
    rows = routed(11, 4, 2, 0, skip=[1])
    made = [random(22, 6, seed=1), random(4, 5, 6, seed=2), random(4, 5, seed=3)]
    found = []
    for form in (grouped_linear, fast.grouped_linear):
        x, weight, bias = (each.clone().requires_grad_() for each in made)
        form(x, weight, rows, bias).square().sum().backward()
        found.append((x.grad, weight.grad, bias.grad))
    for ours, theirs in zip(*found, strict=True):
        assert apart(ours, theirs) < 1e-5


def test_only_what_is_asked_for_gets_a_gradient():
    rows, weight = routed(5, 3, 1, 0), random(3, 4, 6).requires_grad_()
    grouped_linear(random(5, 6), weight, rows).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_tokens_sum_is_in_the_order_of_its_choices_and_of_no_other_token(dtype):
    x, weights = random(9, 3, 37, dtype=dtype, seed=4), random(9, 3, dtype=dtype, seed=5)
    whole = combine_choices(x, weights)
    wanted = (x.double() * weights.double().unsqueeze(2)).sum(1)
    assert whole.dtype == dtype and apart(whole, wanted) < ROUNDING[dtype]
    for token in range(9):
        assert torch.equal(combine_choices(x[token : token + 1], weights[token : token + 1])[0], whole[token])


def test_what_is_collected_is_what_is_combined_and_so_are_its_gradients():
    rows, found = routed(7, 5, 2, 3), []
    for through in (True, False):
        x, weights = random(14, 6, seed=1).requires_grad_(), random(7, 2, seed=2).requires_grad_()
        if through:
            out = combine_rows(x, weights, rows)
        else:
            out = combine_choices(fast.permute(x, rows.place_R, rows.order_R).unflatten(0, (7, 2)), weights)
        out.square().sum().backward()
        found.append((out, x.grad, weights.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_rows_without_weights_are_added_up():
    rows, x = routed(7, 5, 2, 3), random(14, 6, seed=1)
    assert torch.equal(combine_rows(x, None, rows), combine_rows(x, torch.ones(7, 2, device=DEVICE), rows))


def test_gradients_of_the_sum_are_right():
    if CARD:
        pytest.skip("double precision is the library's there")
    x, weights = random(4, 3, 5).double().requires_grad_(), random(4, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(combine_choices, (x, weights))


# -- device code ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_every_tile_finds_its_groups(poisoned, tokens, dtype):
    rows = routed(tokens, 6, 2, tokens, skip=[0, 3])
    x, weight, bias = random(2 * tokens, 32, dtype=dtype), random(6, 24, 32, dtype=dtype), random(6, 24, dtype=dtype)
    wanted = torch.stack([weight[group].double() @ x[row].double() for row, group in enumerate(rows.group_R.tolist())])
    wanted += bias.double()[rows.group_R]
    for tile in TILES if dtype != torch.float32 or not CARD else [linear_triton.FP32_TILE]:
        assert apart(launch_gemm(x, weight, bias, rows.ends_E, torch.float32, tile), wanted) < 1e-5


@needs_triton
def test_choices_are_added_wherever_they_lie(poisoned):
    rows, x, weights = routed(7, 5, 2, 3), random(14, 37), random(7, 2)
    wanted = (x[rows.place_R].view(7, 2, 37) * weights.unsqueeze(2)).sum(1)
    assert apart(launch_combine(x, weights, rows.place_R), wanted) < 1e-6
    assert torch.equal(launch_combine(x[rows.place_R], weights), launch_combine(x, weights, rows.place_R))
