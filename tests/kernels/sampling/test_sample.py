"""Drawing as device code and in torch: against the definition in float64, token by token and in the long run."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, needs_triton, random
from tests.tiers import examples

from miles.backends.native.runner import sampler
from miles.kernels.sampling import sample as module
from miles.kernels.sampling import top_k_top_p
from miles.kernels.sampling.sample import sample_tokens

CODES = [pytest.param(True, marks=needs_triton, id="device"), pytest.param(False, id="torch")]
# Programs that take little at a time, so that short rows have many chunks and long searches.
SMALL = {"CHUNK": 16}, {"_MAX_GATHERED": 8, "_COLUMNS": 8, "_WARPS": 1, "_PIVOTS": 8}


@pytest.fixture(params=CODES)
def on_device(request):
    return request.param


def drawn(device_code, logits, heat, uniform, filters=None, small=True):
    """Tokens and log-probs; the three filters are columns, or none are looked at."""
    rows, made = len(logits), {"device": DEVICE, "dtype": torch.float32}
    tokens = torch.full((rows,), -7, device=DEVICE)
    logprobs = torch.full((rows,), float("nan"), device=DEVICE)
    limits = torch.tensor([[0.0, 1.0, 0.0]] * rows if filters is None else filters).reshape(rows, 3)
    top_k, top_p, min_p = limits.t().contiguous().to(**made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "use_triton_inference", lambda x: device_code)
        if small:
            for target, values in zip((module, top_k_top_p), SMALL, strict=True):
                for name, value in values.items():
                    patch.setattr(target, name, value)
        given_ = {"top_k_B": top_k.long(), "top_p_B": top_p, "min_p_B": min_p, "filters": filters is not None}
        heat, uniform = torch.tensor(heat, **made), torch.tensor(uniform, **made)
        sample_tokens(logits.to(DEVICE), heat, uniform, **given_, tokens_out_B=tokens, logprobs_out_B=logprobs)
    return tokens.cpu(), logprobs.cpu()


def kept(logits, heat, top_k, top_p, min_p):
    """What one row's filters leave of its probabilities, in float64, sorted and counted."""
    probs = (logits.double() / heat).softmax(-1)
    order = probs.sort(descending=True, stable=True).indices
    if 0 < top_k < len(order):
        order = order[: int(top_k)]
    chosen = probs[order]
    if top_p < 1:
        order = order[: max(1, int((chosen.cumsum(0) - chosen < top_p * chosen.sum()).sum()))]
    left = torch.zeros_like(probs)
    left[order] = probs[order]
    return torch.where(left >= min_p * probs.max(), left, 0.0)


def consistent(logits, heat, uniform, limits, token, logprob, slack=2e-6):
    """Whether this token may be drawn for this number, given rounding: of the sums, and at the edges of the filters."""
    greedy = heat == 0
    expected = (logits.double() / (1 if greedy else heat)).log_softmax(-1)[token]
    assert abs(expected - logprob) < 1e-5 * (1 + abs(float(expected)))
    if greedy:
        return token == int(logits.argmax())
    for nudge in (0.0, -slack, slack):
        top_k, top_p, min_p = limits
        moved = (top_k, top_p if top_p >= 1 else top_p * (1 + nudge), min_p * (1 + nudge))
        left = kept(logits, heat, *moved)
        cdf, target = left.cumsum(0), uniform * left.sum()
        if left[token] > 0 and cdf[token] - left[token] - slack <= target <= cdf[token] + slack:
            return True
    return False


filters_of = st.tuples(
    st.sampled_from([0, 1, 2, 5, 17, 63, 1000]),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.1, 0.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
row_of = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]), st.floats(0, 1, exclude_max=True, width=32), filters_of, st.integers(0, 9)
)


def logits_of(kind, size, seed):
    """Rows of many shapes: spread, flat, peaked, full of ties, with tokens that cannot be."""
    x = random(size, seed=seed).cpu()
    match kind % 5:
        case 0:
            return 3 * x
        case 1:
            return x * 1e-3
        case 2:
            return torch.where(torch.arange(size) == size // 2, 30.0, x)
        case 3:
            return x.round()
        case _:
            return torch.where((x > 1) & (torch.arange(size) > 0), -torch.inf, 2 * x)


def checked(device_code, rows, size, seed):
    heat, uniform, limits, kinds = (list(column) for column in zip(*rows, strict=True))
    logits = torch.stack([logits_of(kind, size, seed + i) for i, kind in enumerate(kinds)])
    tokens, logprobs = drawn(device_code, logits, heat, uniform, [list(map(float, f)) for f in limits])
    for i in range(len(rows)):
        found = logits[i], heat[i], uniform[i], limits[i], int(tokens[i]), float(logprobs[i])
        assert consistent(*found), found


cases = {"rows": st.lists(row_of, min_size=1, max_size=4), "size": st.integers(2, 90), "seed": st.integers(0, 999)}


@settings(max_examples=examples(200), deadline=None)
@given(**cases)
def test_every_token_of_the_torch_code_is_the_definitions(rows, size, seed):
    checked(False, rows, size, seed)


@needs_triton
@settings(max_examples=examples(300) if CARD else 6, deadline=None)
@given(**cases)
def test_every_token_of_the_device_code_is_the_definitions(rows, size, seed):
    checked(True, rows if CARD else rows[:2], size, seed)


@pytest.mark.slow
@needs_triton
@settings(max_examples=examples(300) if CARD else 60, deadline=None)
@given(**cases)
def test_every_token_of_the_device_code_is_the_definitions_at_length(rows, size, seed):
    checked(True, rows, size, seed)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 200] + ([151936, 262144, 100001] if CARD else []))
def test_without_filters_any_vocabulary_will_do(on_device, size):
    logits, uniform = 2 * random(4, size).cpu(), [0.0, 0.3, 0.77, 1 - 2**-24]
    tokens, logprobs = drawn(on_device, logits, [1.0, 0.7, 0.0, 2.0], uniform, small=not CARD)
    for i, heat in enumerate([1.0, 0.7, 0.0, 2.0]):
        slack = 2e-6 if size < 1000 else 1e-4
        found = logits[i], heat, uniform[i], (0, 1.0, 0.0), int(tokens[i]), float(logprobs[i])
        assert consistent(*found, slack=slack)


@pytest.mark.skipif(not CARD, reason="takes too long without a card")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32000, 151936, 262144])
def test_whole_vocabularies_are_filtered_as_defined(size, dtype):
    limits = [(0, 0.95, 0.0), (50, 1.0, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.05), (5000, 0.99, 1e-4), (0, 0.5, 0.0)]
    rows = [(kind, limit) for kind in range(5) for limit in limits]
    logits = torch.stack([logits_of(kind, size, seed) for seed, (kind, _) in enumerate(rows)]).to(dtype)
    heat, uniform = [0.9] * len(rows), np.random.default_rng(1).random(len(rows)).tolist()
    tokens, logprobs = drawn(True, logits, heat, uniform, [list(map(float, limit)) for _, limit in rows], small=False)
    for i, (_, limit) in enumerate(rows):
        found = logits[i].float(), heat[i], uniform[i], limit, int(tokens[i]), float(logprobs[i])
        assert consistent(*found, slack=2e-4), (i, rows[i], found[4:])


def test_frequencies_are_the_distributions(on_device):
    if on_device and not CARD:
        pytest.skip("takes minutes in the interpreter, where single tokens are held to the definition")
    size, rounds, limits = 40, 4000, (25, 0.9, 0.02)
    logits, generator = random(1, size, seed=3).cpu(), np.random.default_rng(5)
    wanted = kept(logits[0], 0.8, *limits)
    uniform = generator.random(rounds, dtype=np.float32).tolist()
    tokens, _ = drawn(
        on_device, logits.expand(rounds, -1).contiguous(), [0.8] * rounds, uniform, [list(limits)] * rounds
    )
    counts = torch.bincount(tokens, minlength=size).double()
    expected = wanted / wanted.sum() * rounds
    assert (counts[expected == 0] == 0).all()
    real = expected > 0
    chi, freedom = float(((counts - expected).square() / expected)[real].sum()), int(real.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom)


def test_ties_are_kept_by_the_smallest_ids(on_device):
    mixed, equal = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0] + [0.0] * 24), torch.zeros(30)
    cases = (
        (torch.tensor([-1.0, -0.0] + [-1.0] * 18), [2.0, 0.99, 0.0], {0, 1}),
        (mixed, [3.0, 1.0, 0.0], {0, 2, 3}),
        (mixed, [5.0, 1.0, 0.0], {0, 1, 2, 3, 5}),
        (equal, [0.0, 0.21, 0.0], set(range(7))),
    )
    uniform = [(i + 0.5) / 64 for i in range(64)] if CARD or not on_device else [0.0, 0.999]
    for logits, limits, possible in cases:
        rows = len(uniform)
        tokens, _ = drawn(on_device, logits.repeat(rows, 1), [1.0] * rows, uniform, [limits] * rows)
        assert set(tokens.tolist()) == (possible if rows > 2 else {0, max(possible)})


@pytest.mark.parametrize("filters", [None, [[5.0, 0.9, 0.1]]])
@pytest.mark.parametrize("heat", [0.0, 0.5])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_show_in_the_log_prob_of_their_row_alone(on_device, bad, heat, filters):
    logits = random(3, 50).cpu()
    logits[1, 37] = bad
    tokens, logprobs = drawn(on_device, logits, [heat] * 3, [0.4] * 3, filters and filters * 3)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_a_row_in_which_nothing_is_possible_is_seen(on_device):
    _, logprobs = drawn(on_device, torch.full((1, 50), -torch.inf), [1.0], [0.4])
    assert logprobs.isnan().all()


@pytest.mark.parametrize("filters", [None, [[0.0, 1.0, 0.0]], [[0.0, 1.0 - 2**-24, 0.0]]])
def test_nothing_impossible_is_drawn_even_at_the_end(on_device, filters):
    logits = torch.full((1, 60), -torch.inf)
    logits[0, [7, 21]] = torch.tensor([0.0, 1.0])
    for uniform, token in ((0.0, 7), (1 - 2**-24, 21)):
        assert drawn(on_device, logits, [1.0], [uniform], filters)[0].tolist() == [token]


@needs_triton
def test_a_rows_token_does_not_depend_on_the_others_nor_on_where_they_lie():
    logits, heat, uniform = 2 * random(3, 50).cpu(), [1.0, 0.5, 1.3], [0.1, 0.9, 0.5]
    limits = [[0.0, 1.0, 0.0], [4.0, 1.0, 0.0], [0.0, 0.7, 0.1]]
    wide = torch.cat((torch.zeros(3, 3), logits), 1).to(DEVICE)[:, 3:]
    tokens, logprobs = drawn(True, wide, heat, uniform, limits)
    for i in range(3):
        alone = drawn(True, logits[i : i + 1], heat[i : i + 1], uniform[i : i + 1], limits[i : i + 1])
        assert alone[0][0] == tokens[i] and alone[1][0] == logprobs[i]


def test_in_torch_it_is_what_the_engine_draws_step_by_step():
    logits, rows = 2 * random(64, 90).cpu(), 64
    uniform = torch.rand(rows)
    limits = torch.tensor([[0, 1, 0], [5, 1, 0], [0, 0.8, 0], [20, 0.9, 0.1]], dtype=torch.float32).repeat(rows // 4, 1)
    tokens, _ = drawn(False, logits, [0.7] * rows, uniform.tolist(), limits.tolist())
    top_k, top_p, min_p = limits.to(DEVICE).unbind(1)
    probs = sampler.filter_probs((logits.to(DEVICE) / 0.7).log_softmax(-1).exp(), top_k.long(), top_p, min_p)
    assert torch.equal(tokens, sampler.sample_inverse_cdf(probs, uniform.to(DEVICE)).cpu())
