"""Logits, log-sums and drawn tokens: the engine's log-prob of a token is the trainer's, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, needs_triton, random
from tests.tiers import examples

from miles.kernels.batch_invariant import logprob
from miles.kernels.batch_invariant.logprob import (
    LogitChunks,
    compute_logits,
    compute_logprob_stats,
    compute_target_logprobs,
    logsumexp,
    merge_chunks,
    reduce_chunks,
)
from miles.kernels.batch_invariant.logprob_triton import (
    launch_merge_chunks,
    launch_reduce_chunks,
    launch_target_logprobs,
)
from miles.kernels.batch_invariant.sampling import sample_tokens

SIZES = st.sampled_from([1, 7, 64, 4095, 4096, 4097, 9001])
LOWEST = float("-inf")


def drawn(logits, heat, uniform, filters=None):
    rows = len(logits)
    limits = torch.tensor([filters or (0.0, 1.0, 0.0)] * rows, device=DEVICE).reshape(rows, 3)
    top_k, top_p, min_p = limits.t().contiguous()
    tokens = torch.full((rows,), -7, device=DEVICE)
    logprobs = torch.full((rows,), float("nan"), device=DEVICE)
    given_ = {"top_k_B": top_k.long(), "top_p_B": top_p, "min_p_B": min_p, "filters": filters is not None}
    sample_tokens(logits, heat, uniform, **given_, tokens_out_B=tokens, logprobs_out_B=logprobs)
    return tokens, logprobs


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(1, 9),
    size=SIZES,
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
    filters=st.sampled_from([None, (5.0, 0.9, 0.01)]),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
def test_what_is_drawn_in_one_batch_is_scored_the_same_in_another(rows, size, temperature, filters, seed, data):
    hidden, weight = random(rows, 24, seed=seed), random(size, 24, seed=seed + 1)
    heat, uniform = torch.full((rows,), temperature, device=DEVICE), torch.rand(rows, device=DEVICE)
    logits = compute_logits(hidden, weight)
    tokens, logprobs = drawn(logits, heat, uniform, filters)
    order = torch.tensor(data.draw(st.permutations(range(rows))), device=DEVICE)
    others = torch.cat((random(data.draw(st.integers(0, 20)), 24, seed=seed + 2), hidden[order]))
    again = compute_logits(others, weight)[-rows:]
    assert torch.equal(compute_logprob_stats(again, tokens[order], temperature).logp_R, logprobs[order])
    assert torch.equal(compute_logprob_stats(again, tokens[order], heat[order]).logp_R, logprobs[order])
    picked, said = drawn(again, heat[order], uniform[order], filters)
    assert torch.equal(picked, tokens[order]) and torch.equal(said, logprobs[order])
    exact = (again.double() / temperature).log_softmax(-1).gather(1, tokens[order][:, None])[:, 0]
    assert torch.allclose(said.double(), exact, atol=2e-5)


@settings(max_examples=examples(25), deadline=None)
@given(rows=st.integers(1, 5), size=SIZES, temperature=st.sampled_from([0.0, 1.0, 0.3]), seed=st.integers(0, 2**20))
def test_log_sums_and_entropies_are_right(rows, size, temperature, seed):
    logits = 5 * random(rows, size + 3, seed=seed)
    targets = torch.randint(0, size, (rows,), device=DEVICE)
    scores = compute_logprob_stats(logits, targets, temperature, size=size)
    logp = (logits[:, :size].double() / (temperature or 1.0)).log_softmax(-1)
    assert torch.allclose(scores.logp_R.double(), logp.gather(1, targets[:, None])[:, 0], atol=5e-5, rtol=1e-6)
    assert torch.allclose(scores.entropy_R.double(), -(logp.exp() * logp).sum(-1), atol=2e-5)
    wanted = (logits[:, :size].double() / (temperature or 1.0)).logsumexp(-1)
    assert torch.allclose(logsumexp(logits[:, :size].contiguous(), temperature).double(), wanted, atol=2e-5, rtol=1e-6)


def test_ranks_put_their_chunks_side_by_side():
    logits, targets = 3 * random(4, 3 * logprob.CHUNK - 100), torch.tensor([1, 5000, 9000, 8191], device=DEVICE)
    parts = [reduce_chunks(part.contiguous(), 0.9) for part in logits.split(logprob.CHUNK, -1)]
    lse, entropy = merge_chunks(LogitChunks(*(torch.cat(each, 1) for each in zip(*parts, strict=True))))
    whole = compute_logprob_stats(logits, targets, 0.9)
    assert torch.equal(lse, whole.lse_R) and torch.equal(entropy, whole.entropy_R)


def test_a_rank_may_have_nothing_but_padding():
    logits = random(2, 5000)
    nothing = reduce_chunks(random(2, 10), size=0)
    assert nothing.max_RC.shape == (2, 0)
    empty = LogitChunks(*(torch.full((2, 1), value, device=DEVICE) for value in (LOWEST, 0.0, 0.0)))
    lse, entropy = merge_chunks(
        LogitChunks(*(torch.cat(each, 1) for each in zip(reduce_chunks(logits), empty, strict=True)))
    )
    assert torch.allclose(lse, logits.logsumexp(-1)) and entropy.isfinite().all()


def test_targets_elsewhere_count_as_zero():
    logits, lse = random(2, 8), torch.tensor([1.5, 2.5], device=DEVICE)
    found = compute_target_logprobs(logits, torch.tensor([-1, 3], device=DEVICE), 1.0, lse)
    assert found[0] == -1.5 and torch.allclose(found[1], logits[1, 3] - 2.5)


def test_rows_that_are_no_numbers_have_no_log_prob():
    logits = random(4, 50)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), LOWEST
    _, logprobs = drawn(logits, torch.ones(4, device=DEVICE), torch.full((4,), 0.5, device=DEVICE))
    assert logprobs[:3].isnan().all() and logprobs[3].isfinite()


def test_greedy_rows_take_the_best_and_tell_of_the_temperature_one():
    logits = random(3, 77, seed=1)
    tokens, logprobs = drawn(logits, torch.zeros(3, device=DEVICE), torch.rand(3, device=DEVICE))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logprobs, compute_logprob_stats(logits, tokens, 1.0).logp_R)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_keep_their_digits_and_may_be_bounded(dtype):
    hidden, weight = random(5, 64, dtype=dtype), random(37, 64, dtype=dtype)
    exact = hidden.double() @ weight.double().T
    found = compute_logits(hidden, weight)
    assert found.dtype == torch.float32 and torch.allclose(found.double(), exact, atol=1e-4, rtol=1e-5)
    assert torch.allclose(compute_logits(hidden, weight, 3.0).double(), 3 * (exact / 3).tanh(), atol=1e-4)
    with torch.no_grad():
        assert torch.equal(
            compute_logits(hidden, weight, 3.0), compute_logits(hidden.clone().requires_grad_(), weight, 3.0)
        )


def test_gradients_flow_through_bounded_logits():
    if CARD:
        pytest.skip("double precision is the library's there")
    given_ = random(3, 6).double().requires_grad_(), random(5, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *both: compute_logits(*both, 2.0), given_)


# -- device code ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("each", [False, True])
def test_device_code_finds_what_torch_finds(poisoned, each):
    logits = 4 * random(5, 9000)
    heat = torch.tensor([1, 0.5, 0, 2.0, 0.7] if each else [0.7], device=DEVICE)
    targets = torch.tensor([1, 2, 3, 8998, -1], device=DEVICE)
    lse, entropy = launch_merge_chunks(*launch_reduce_chunks(logits, heat, 8999, logprob.CHUNK))
    scaled = logits[:, :8999].double() / torch.where(heat == 0, 1, heat)[:, None].double()
    assert torch.allclose(lse.double(), scaled.logsumexp(-1), atol=2e-5)
    logp = scaled.log_softmax(-1)
    assert torch.allclose(entropy.double(), -(logp.exp() * logp).sum(-1), atol=2e-5)
    found = torch.empty(5, device=DEVICE)
    launch_target_logprobs(logits, heat, targets, lse, found)
    assert torch.allclose(found[:4].double(), logp[range(4), targets[:4]], atol=2e-5) and found[4] == -lse[4]
