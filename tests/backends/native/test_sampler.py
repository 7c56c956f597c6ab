"""Drawing: one uniform number a token, the inverse CDF, and filters that cut exactly what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from miles.backends.native.sampler import Manner, draw, filtered, invert, uniforms
from miles.core.errors import EngineError


def manner(rows, *, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, index=None):
    full = lambda value, kind: np.full(rows, value, kind)  # noqa: E731
    return Manner(
        temperature_B=full(temperature, np.float32),
        top_k_B=full(top_k, np.int64),
        top_p_B=full(top_p, np.float32),
        min_p_B=full(min_p, np.float32),
        filters_B=full(top_k > 0 or top_p < 1 or min_p > 0, np.bool_),
        seed_B=full(seed, np.uint64),
        index_B=np.arange(rows, dtype=np.uint64) if index is None else index,
    )


def test_uniforms_fill_the_unit_interval_evenly_along_positions_and_along_seeds():
    many, none = np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.uint64)
    for u in (uniforms(none, many), uniforms(many, none), uniforms(many, many)):
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
    tokens = invert(probs.expand(4096, -1).contiguous(), grid)
    assert torch.bincount(tokens, minlength=7).tolist() == [512, 0, 2048, 0, 1024, 512, 0]
    assert tokens.diff().ge(0).all()


@given(st.integers(0, 2**32), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(seed, size):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(64, size, generator=generator) * (torch.rand(64, size, generator=generator) < 0.3)
    probs[:, seed % size] += 1e-6
    edge = torch.tensor([0.0, 1 - 2**-24]).repeat(32)
    for u in (edge, torch.rand(64, generator=generator)):
        assert (probs.gather(1, invert(probs, u)[:, None]) > 0).all()


def test_draws_follow_the_softmax():
    logits = torch.linspace(-2, 2, 12)
    for temperature in (1.0, 0.6):
        tokens, logprobs = draw(logits.expand(20_000, -1).contiguous(), manner(20_000, temperature=temperature))
        expected = (logits / temperature).softmax(0)
        counts = np.bincount(tokens, minlength=12)
        chi_square = ((counts - 20_000 * expected.numpy()) ** 2 / (20_000 * expected.numpy())).sum()
        assert chi_square < 35  # 11 degrees of freedom: exceeded once in 4,000
        np.testing.assert_allclose(logprobs, expected.log()[tokens].numpy(), atol=1e-6)


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
    kept = filtered(logits.softmax(-1), *columns)
    assert torch.equal(kept > 0, scores > float("-inf"))
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), scores.softmax(-1))


def test_a_row_is_drawn_alike_whatever_its_neighbours_ask_for():
    torch.manual_seed(1)
    logits = torch.randn(6, 40)
    mixed = Manner(
        temperature_B=np.array([0, 1, 0.5, 2, 1, 1], np.float32),
        top_k_B=np.array([-1, 5, -1, -1, -1, 3]),
        top_p_B=np.array([1, 1, 0.5, 1, 1, 0.9], np.float32),
        min_p_B=np.array([0, 0, 0, 0.2, 0, 0.1], np.float32),
        filters_B=np.array([False, True, True, True, False, True]),
        seed_B=np.arange(6, dtype=np.uint64),
        index_B=np.arange(6, dtype=np.uint64) * np.uint64(7),
    )
    together = draw(logits, mixed)
    for row in range(6):
        alone = Manner(**{name: getattr(mixed, name)[row : row + 1] for name in Manner.__dataclass_fields__})
        tokens, logprobs = draw(logits[row : row + 1], alone)
        assert tokens[0] == together[0][row]
        assert logprobs[0] == together[1][row]
    assert together[0][0] == logits[0].argmax()


def test_logits_that_are_not_finite_are_an_error_and_not_a_token():
    logits = torch.zeros(2, 5)
    logits[1, 2] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        draw(logits, manner(2))
