"""Experts as device code against a loop over tokens in float64, and against the grouped products of a trainer."""

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random

from miles.kernels.activation_kinds import limited_swiglu
from miles.kernels.fused.activation import apply_activation
from miles.kernels.moe import fused_moe as module
from miles.kernels.moe import moe_gemv
from miles.kernels.moe.fused_moe import LARGE_SMEM_TILE_CONFIGS, TILE_CONFIGS, _place_rows_kernel, moe_forward
from miles.kernels.numerics import FAST

LIMITED = [limited_swiglu(2.5), limited_swiglu(2.5, behind=True)]

# tokens, choices, experts, features, intermediate
SHAPES = [(1, 2, 4, 32, 16), (5, 1, 3, 24, 40), (19, 3, 4, 16, 24)]
if CARD:
    SHAPES += [(tokens, 8, 128, 2048, 768) for tokens in (1, 3, 16, 64, 256, 700, 1100)]
    SHAPES += [(8, 4, 32, 2880, 2880), (300, 6, 64, 2048, 1408), (33, 8, 256, 512, 200)]
    SHAPES += [(3000, 8, 128, 2048, 768), (2600, 1, 8, 512, 1000)]
# One token, whose outputs are fewer than programs, as many, or leave some programs with one more than others.
LONE = [(1, 1, 2, 3, 5), (1, 1, 2, 4, 8), (1, 2, 3, 20, 12), (1, 3, 5, 33, 7), (1, 4, 4, 17, 13)]
LONE += [(1, 5, 7, 24, 11), (1, 6, 6, 50, 9), (1, 7, 9, 40, 5), (1, 8, 16, 64, 16), (1, 8, 9, 21, 10)]
if CARD:
    LONE += [(1, 8, 128, 2048, 768), (1, 6, 64, 2048, 1408), (1, 10, 64, 2048, 512), (1, 8, 16, 4096, 1536)]


@pytest.fixture
def on_device(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    monkeypatch.setattr(moe_gemv, "use_triton_inference", lambda x: True)


def chosen(tokens, choices, experts):
    return torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).to(DEVICE)


def case(shape, dtype, *, heights=2, biased=False):
    tokens, choices, experts, width, size = shape
    made = {"dtype": dtype}
    given = random(tokens, width, **made), random(tokens, choices).softmax(-1).to(dtype), chosen(*shape[:3])
    weights = width**-0.5 * random(experts, heights * size, width), size**-0.5 * random(experts, width, size)
    biases = (random(experts, heights * size, **made), random(experts, width, **made)) if biased else (None, None)
    return *given, *(each.to(dtype) for each in weights), biases


def by_token(x, weights, experts, first, down, biases, kind, interleaved=False, weigh_input=False):
    """The definition, one expert after the other, in float64."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float64, device=x.device)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        weight = weights[token, choice, None].double()
        inner = (x[token].double() * (weight if weigh_input else 1)) @ first[expert].double().t()
        inner = inner if biases[0] is None else inner + biases[0][expert].double()
        gate, up = inner, None
        if first.shape[1] != down.shape[2]:
            gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else inner.chunk(2, -1)
        row = apply_activation(gate, up, kind) @ down[expert].double().t()
        row = row if biases[1] is None else row + biases[1][expert].double()
        out.index_add_(0, token, row * (1 if weigh_input else weight))
    return out


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_over_experts_is_the_definitions(on_device, shape, dtype):
    *given, biases = case(shape, dtype)
    out = moe_forward(*given, activation="silu", numerics=FAST)
    assert out.dtype == dtype and apart(out, by_token(*given, biases, "silu")) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", "swiglu_clamped", *LIMITED])
@pytest.mark.parametrize("variant", ["biased", "interleaved", "flat", "weighed", "weighed, two each"])
def test_every_variant_is_the_definitions(on_device, variant, kind, dtype):
    if variant == "flat" and kind in ("swiglu_clamped", *LIMITED):
        pytest.skip("has a gate by definition")
    shape = (6, 1 if variant == "weighed" else 2, 3, 16, 24)
    *given, biases = case(shape, dtype, heights=1 if variant == "flat" else 2, biased=variant in ("biased", "flat"))
    more = {"interleaved": variant == "interleaved", "weigh_input": variant.startswith("weighed")}
    out = moe_forward(*given, activation=kind, first_bias_EF=biases[0], down_bias_ED=biases[1], **more, numerics=FAST)
    assert apart(out, by_token(*given, biases, kind, *more.values())) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize(
    "plan", dict.fromkeys(TILE_CONFIGS + (LARGE_SMEM_TILE_CONFIGS if CARD else LARGE_SMEM_TILE_CONFIGS[1:2]))
)
def test_every_plan_gives_the_same(on_device, monkeypatch, plan):
    monkeypatch.setattr(module, "select_tile_configs", lambda device: (plan._replace(max_rows_per_expert=1e9),))
    dtype = torch.bfloat16 if CARD else torch.float16
    *given, biases = case((300, 8, 128, 2048, 768) if CARD else (9, 2, 2, 80, 40), dtype)
    assert (
        apart(moe_forward(*given, activation="silu", numerics=FAST), by_token(*given, biases, "silu")) < ROUNDING[dtype]
    )


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_outside_the_engine_it_is_the_trainers_own_with_gradients(weigh_input, interleaved):
    x, weights, experts, first, down, biases = case((7, 3, 5, 8, 6), torch.float32, biased=True)
    x.requires_grad_(), first.requires_grad_(), down.requires_grad_()
    given = (x, weights, experts, first, down)
    more = {"interleaved": interleaved, "weigh_input": weigh_input}
    out = moe_forward(*given, activation="silu", first_bias_EF=biases[0], down_bias_ED=biases[1], **more, numerics=FAST)
    assert apart(out, by_token(*given, biases, "silu", **more)) < 1e-5
    out.sum().backward()
    assert all(each.grad is not None for each in (x, first, down))


@needs_triton
@pytest.mark.parametrize("rows", [1, 7, 40] + ([2048, 5000] if CARD else []))
@pytest.mark.parametrize("experts", [1, 5])
def test_every_row_has_one_place_in_a_block_of_its_expert(poisoned, rows, experts):
    owners = torch.randint(0, experts, (rows,), device=DEVICE)
    blocks, block = min(rows, rows // 4 + experts), 4
    places = torch.full((blocks, block), -5, dtype=torch.int32, device=DEVICE)
    owner = torch.full((blocks,), -5, dtype=torch.int32, device=DEVICE)
    _place_rows_kernel[(experts,)](owners, places, owner, rows, blocks, BLOCK_E=8, BLOCK_R=16, M=block, PDL=False)
    used = owner >= 0
    assert ((owner == -1) | used).all()
    filled = places[used]
    real = filled < rows
    assert sorted(filled[real].tolist()) == list(range(rows)) and (filled[~real] == rows).all()
    assert torch.equal(owners[filled[real].long()], owner[used].long()[:, None].expand_as(filled)[real])
    # In order within an expert, and no block is left half empty before another of its own.
    for expert in range(experts):
        mine = filled[owner[used] == expert].flatten()
        assert torch.equal(mine, mine.sort().values)


@pytest.fixture
def one_processor(monkeypatch):
    """Few programs, so that each has several outputs."""
    monkeypatch.setattr(moe_gemv, "count_sms", lambda device: 1)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LONE)
def test_a_single_tokens_experts_are_the_definitions(on_device, one_processor, shape, dtype):
    *given, biases = case(shape, dtype)
    assert moe_gemv.can_use_moe_gemv(given[0], given[2], given[3], given[4])
    out = moe_forward(*given, activation="silu", numerics=FAST)
    assert out.dtype == dtype and apart(out, by_token(*given, biases, "silu")) < ROUNDING[dtype]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", "swiglu_clamped", LIMITED[1]])
@pytest.mark.parametrize("shape", [(3, 3, 5, 20, 12), (2, 5, 7, 33, 7)] + ([(3, 8, 128, 2048, 768)] if CARD else []))
def test_a_single_token_has_the_experts_it_has_among_others(on_device, shape, kind, dtype):
    x, weights, experts, *stacked, _ = case(shape, dtype)
    together = moe_forward(x, weights, experts, *stacked, activation=kind, numerics=FAST)
    for i in range(len(x)):
        mine = (x[i : i + 1], weights[i : i + 1], experts[i : i + 1])
        assert moe_gemv.can_use_moe_gemv(mine[0], mine[2], *stacked)
        assert (
            apart(moe_forward(*mine, *stacked, activation=kind, numerics=FAST), together[i : i + 1]) < ROUNDING[dtype]
        )


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_how_many_programs_share_a_single_token_changes_nothing(on_device, monkeypatch, dtype):
    *given, _ = case((1, 5, 7, 37, 11), dtype)
    outs = []
    for processors in (1, 2, 3, 100):
        monkeypatch.setattr(moe_gemv, "count_sms", lambda device, processors=processors: processors)
        outs.append(moe_forward(*given, activation="silu", numerics=FAST))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_programs_that_ask_for_much_at_once_are_fewer(monkeypatch):
    monkeypatch.setattr(moe_gemv, "count_sms", lambda device: 132)
    # Experts of 2048 features and 768 channels, 8 chosen, in half precision; twice as wide; in float32 and wider still.
    assert moe_gemv._count_programs(8 * 768, 8, 2 * 2048 * 2, DEVICE) == 8 * 132
    assert moe_gemv._count_programs(2048, 4, 8 * 1024 * 2, DEVICE) == 4 * 132
    assert moe_gemv._count_programs(2048, 4, 8 * 2048 * 2, DEVICE) == 2 * 132
    assert moe_gemv._count_programs(2048, 4, 8 * 4096 * 4, DEVICE) == 132
    # No more than there are outputs, and small ones do not crowd a processor.
    assert moe_gemv._count_programs(100, 4, 8 * 1024 * 2, DEVICE) == 100
    assert moe_gemv._count_programs(10**6, 8, 64, DEVICE) == 8 * 132
