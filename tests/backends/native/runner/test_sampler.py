"""Sampler: one uniform number per token, the inverse CDF, and exact top-k, top-p and min-p filters."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from miles.backends.native.engine.forward_batch import (
    LogitEdits,
    LogprobQueries,
    SamplingBatch,
    compute_uniforms,
    derive_rng_streams,
)
from miles.backends.native.engine.req import pack_token_mask
from miles.backends.native.runner.model_runner import EagerStep, HostToDevice
from miles.backends.native.runner.sampler import (
    apply_logit_edits,
    filter_probs,
    gather_logprobs,
    sample,
    sample_inverse_cdf,
)
from miles.core.errors import EngineError
from miles.kernels.numerics import FAST

SEND = HostToDevice(torch.device("cpu"))
EDITS = LogitEdits.__dataclass_fields__


def build_sampling(rows, *, temperature=1.0):
    full = lambda value, kind: np.full(rows, value, kind)  # noqa: E731
    return SamplingBatch(
        temperature_D=full(temperature, np.float32),
        top_k_D=full(-1, np.int64),
        top_p_D=full(1.0, np.float32),
        min_p_D=full(0.0, np.float32),
        has_filter_D=full(False, np.bool_),
        uniform_D=compute_uniforms(derive_rng_streams(full(0, np.uint64)), np.arange(rows, dtype=np.uint64)),
    )


def test_uniforms_fill_the_unit_interval_evenly_along_positions_and_along_seeds():
    many, none = np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.uint64)
    for u in (
        compute_uniforms(derive_rng_streams(seeds), places)
        for seeds, places in ((none, many), (many, none), (many, many))
    ):
        assert u.dtype == np.float32
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, bins=50, range=(0, 1))[0]
        chi_square = ((counts - 2000) ** 2 / 2000).sum()
        assert chi_square < 90  # 49 degrees of freedom: exceeded once in 3,000
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


def test_every_uniform_number_maps_to_the_token_whose_share_of_the_interval_it_lies_in():
    probs = torch.tensor([0.125, 0.0, 0.5, 0.0, 0.25, 0.125, 0.0])
    grid = torch.arange(4096) / 4096
    tokens = sample_inverse_cdf(probs.expand(4096, -1).contiguous(), grid)
    assert torch.bincount(tokens, minlength=7).tolist() == [512, 0, 2048, 0, 1024, 512, 0]
    assert tokens.diff().ge(0).all()


@given(st.integers(0, 2**32), st.integers(1, 50))
@settings(max_examples=examples(60), deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(seed, size):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(64, size, generator=generator) * (torch.rand(64, size, generator=generator) < 0.3)
    probs[:, seed % size] += 1e-6
    edge = torch.tensor([0.0, 1 - 2**-24]).repeat(32)
    for u in (edge, torch.rand(64, generator=generator)):
        assert (probs.gather(1, sample_inverse_cdf(probs, u)[:, None]) > 0).all()


def test_draws_follow_the_softmax():
    logits = torch.linspace(-2, 2, 12)
    for temperature in (1.0, 0.6):
        sampling = build_sampling(20_000, temperature=temperature)
        tokens, logprobs, _ = sample(logits.expand(20_000, -1).contiguous(), sampling, SEND, numerics=FAST)
        expected = (logits / temperature).softmax(0)
        counts = np.bincount(tokens.numpy(), minlength=12)
        chi_square = ((counts - 20_000 * expected.numpy()) ** 2 / (20_000 * expected.numpy())).sum()
        assert chi_square < 35  # 11 degrees of freedom: exceeded once in 4,000
        torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("top_k", [-1, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_filters_keep_what_those_of_transformers_keep(top_k, top_p, min_p):
    torch.manual_seed(0)
    logits = torch.randn(40, 30) * 2
    scores = logits
    for warper in (
        *([TopKLogitsWarper(top_k)] if top_k > 0 else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        *([MinPLogitsWarper(min_p)] if min_p > 0 else []),
    ):
        scores = warper(None, scores)
    columns = [torch.full((40,), value) for value in (top_k, top_p, min_p)]
    kept = filter_probs(logits.softmax(-1), *columns)
    assert torch.equal(kept > 0, scores > float("-inf"))
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), scores.softmax(-1))


def test_a_row_is_drawn_alike_whatever_its_neighbours_ask_for():
    torch.manual_seed(1)
    logits = torch.randn(6, 40)
    mixed = SamplingBatch(
        temperature_D=np.array([0, 1, 0.5, 2, 1, 1], np.float32),
        top_k_D=np.array([-1, 5, -1, -1, -1, 3]),
        top_p_D=np.array([1, 1, 0.5, 1, 1, 0.9], np.float32),
        min_p_D=np.array([0, 0, 0, 0.2, 0, 0.1], np.float32),
        has_filter_D=np.array([False, True, True, True, False, True]),
        uniform_D=compute_uniforms(
            derive_rng_streams(np.arange(6, dtype=np.uint64)), np.arange(6, dtype=np.uint64) * np.uint64(7)
        ),
    )
    together = sample(logits, mixed, SEND, numerics=FAST)
    for row in range(6):
        alone = SamplingBatch(
            **{name: getattr(mixed, name)[row : row + 1] for name in SamplingBatch.__dataclass_fields__}
        )
        tokens, logprobs, _ = sample(logits[row : row + 1], alone, SEND, numerics=FAST)
        assert tokens[0] == together[0][row]
        assert logprobs[0] == together[1][row]
    assert together[0][0] == logits[0].argmax()


def test_logits_that_are_not_finite_give_no_finite_logprob_in_their_row_only():
    logits = torch.zeros(2, 5)
    logits[1, 2] = float("nan")
    tokens, logprobs, _ = sample(logits, build_sampling(2), SEND, numerics=FAST)
    assert np.isfinite(EagerStep(tokens, logprobs).result().logprobs_D).tolist() == [True, False]


def test_penalties_masks_and_biases_change_the_logits_by_the_written_rule():
    torch.manual_seed(2)
    logits = torch.randn(3, 70)
    none, zero = np.zeros(0, np.int64), np.zeros(0, np.float32)
    allowed = np.arange(70) % 3 == 0
    edits = LogitEdits(
        add_rows_E=np.array([0, 0, 2]),
        add_tokens_E=np.array([5, 5, 69]),
        add_E=np.array([-0.5, -0.25, -np.inf], np.float32),
        scale_rows_E=np.array([0, 1, 1]),
        scale_tokens_E=np.array([5, 6, 7]),
        scale_E=np.array([1.5, 1.5, 0.5], np.float32),
        mask_rows_K=np.array([1]),
        masks_KZ=pack_token_mask(allowed, 70)[None],
        bias_rows_E=np.array([2, 2]),
        bias_tokens_E=np.array([1, 1]),
        bias_E=np.array([3.0, 1.0], np.float32),
    )
    expected = logits.clone()
    penalised = logits[0, 5] - 0.75
    expected[0, 5] = penalised / 1.5 if penalised > 0 else penalised * 1.5
    expected[1, ~torch.from_numpy(allowed)] = -torch.inf
    expected[1, 6] = logits[1, 6] / 1.5 if logits[1, 6] > 0 else logits[1, 6] * 1.5
    expected[2, 69] = -torch.inf
    expected[2, 1] += 4
    before = logits.clone()
    torch.testing.assert_close(apply_logit_edits(logits, edits, SEND), expected)
    assert torch.equal(logits, before)
    nothing = {name: zero if name.endswith("_E") and "_" not in name[:-2] else none for name in EDITS}
    assert torch.equal(
        apply_logit_edits(logits, LogitEdits(**nothing | {"masks_KZ": np.zeros((0, 3), np.int32)}), SEND), logits
    )


def test_a_mask_shorter_than_the_vocabulary_allows_nothing_beyond():
    assert pack_token_mask(np.ones(40, np.bool_), 70).tolist() == [-1, 255, 0]
    assert pack_token_mask(np.array([-1, -1, -1, -1], np.int32), 70).tolist() == [-1, -1, -1]
    with pytest.raises(EngineError, match="allows no token"):
        pack_token_mask(np.zeros(70, np.bool_), 70)


def test_looking_finds_the_likeliest_and_the_watched_and_can_be_cut_by_rows():
    torch.manual_seed(3)
    logprobs = torch.randn(7, 20).log_softmax(-1)
    queries = LogprobQueries(
        top_k=4,
        rows_R=np.array([0, 3, 4, 6]),
        token_rows_W=np.array([1, 1, 3, 6]),
        tokens_W=np.array([2, 5, 19, 0]),
    )
    tokens, values, watched = gather_logprobs(logprobs, queries, SEND)
    expected = logprobs[[0, 3, 4, 6]].sort(-1, descending=True)
    assert torch.equal(tokens, expected.indices[:, :4])
    assert torch.equal(values, expected.values[:, :4])
    assert torch.equal(watched, logprobs[[1, 1, 3, 6], [2, 5, 19, 0]])
    parts = [gather_logprobs(logprobs[lo : lo + 3], queries.slice_rows(lo, lo + 3), SEND) for lo in (0, 3, 6)]
    for whole, cut in zip((tokens, values, watched), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(cut))
