"""Sets of tokens made from two lists of them, against the trainer's own masks over the vocabulary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.algo.distillation_loss import (
    KL_DIRECTIONS,
    TOKEN_SETS,
    TopKTokens,
    compute_log_ratios,
    compute_log_ratios_from_topk,
)
from miles.rollout.distill.topk_set import TopKSet

V = 12


def tops(logp: torch.Tensor, k: int) -> np.ndarray:
    return logp.topk(min(k, V), -1).indices.numpy().astype(np.int32)


def made(logp: torch.Tensor, logq: torch.Tensor, top: TopKSet):
    """The set as the rollout makes it, from what a server would say."""
    own = tops(logp, top.k) if top.needs_student_top_k else None
    theirs = tops(logq, top.k) if top.needs_teacher_top_k else None
    said = None if theirs is None else logq.numpy()[np.arange(len(logq))[:, None], theirs]
    watched = (
        logq.numpy()[np.arange(len(logq))[:, None], own] if top.scores_student_tokens and own is not None else None
    )
    return top.build(own, theirs, said, watched)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, V + 2), name=st.sampled_from(sorted(TOKEN_SETS)))
def test_a_set_and_its_divergences_are_those_of_the_masks(seed, k, name):
    torch.manual_seed(seed)
    logp, logq = (torch.log_softmax(2 * torch.randn(5, V, dtype=torch.float64), -1) for _ in range(2))
    ids, values = made(logp, logq, TopKSet(k=k, strategy=name, vocab_size=V))
    mask = TopKTokens(k=k, tokens=TOKEN_SETS[name])(logp, logq)
    for row, said, seen, exact in zip(ids, values, mask, logq, strict=True):
        kept = row[row >= 0]
        assert len(set(kept)) == len(kept) and set(kept) == set(seen.nonzero()[:, 0].tolist())
        assert np.allclose(said[row >= 0], exact[torch.from_numpy(kept.astype(np.int64))], atol=1e-6)
    ratio = compute_log_ratios_from_topk(logp, torch.from_numpy(ids).long(), torch.from_numpy(values))
    expected = compute_log_ratios(logp, logq, TopKTokens(k=k, tokens=TOKEN_SETS[name]))
    for weigh in KL_DIRECTIONS.values():
        assert torch.allclose(weigh.kl(logp, ratio), weigh.kl(logp, expected), atol=3e-5)


def test_tokens_that_only_the_teacher_has_are_left_to_all_others():
    ids = np.array([[0, V + 1]], np.int32)
    top = TopKSet(k=2, strategy="only-teacher", vocab_size=V)
    kept, values = top.build(None, ids, np.array([[-1.0, -2.0]], np.float32), None)
    assert kept.tolist() == [[0, -1]] and values.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "student", "teacher", "watches"),
    [
        ("only-student", True, False, True),
        ("only-teacher", False, True, False),
        ("intersection", True, True, False),
        ("union", True, True, True),
        ("xor", True, True, True),
    ],
)
def test_nobody_is_asked_for_more_than_is_needed(name, student, teacher, watches):
    top = TopKSet(k=2, strategy=name, vocab_size=V)
    assert (top.needs_student_top_k, top.needs_teacher_top_k, top.scores_student_tokens) == (student, teacher, watches)
