"""Reverse KLs against closed forms, token sets against each other, and prompts that find their teacher."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algo.advantages import GroupRelativeAdvantages, OutcomeEstimator, zero_advantages
from miles.algo.distillation_loss import (
    KL_DIRECTIONS,
    TEACHER_INDEX,
    TOKEN_SETS,
    TeacherAssignedEstimator,
    TopKTokens,
    compute_log_ratios,
    compute_log_ratios_from_topk,
    distillation_advantage,
    forward_kl,
    resolve_teacher,
    reverse_kl,
    reverse_kl_grad,
)
from miles.core.errors import DataError
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version

P, Q = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


def random_logs(seed, rows=5, vocab=9, spread=2.0):
    torch.manual_seed(seed)
    return (torch.log_softmax(spread * torch.randn(rows, vocab, dtype=torch.float64), -1) for _ in range(2))


def kl(logp, logq, top=None):
    return reverse_kl(logp, compute_log_ratios(logp, logq, top))


def test_the_whole_kl_is_the_sum_over_the_vocabulary():
    expected = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
    assert kl(logs(P), logs(Q)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "seen"),
    [("only-student", {0}), ("only-teacher", {2}), ("union", {0, 2}), ("intersection", set()), ("xor", {0, 2})],
)
def test_tokens_outside_the_set_count_as_one(name, seen):
    rest_p, rest_q = (sum(x for i, x in enumerate(each) if i not in seen) for each in (P, Q))
    expected = sum(P[i] * math.log(P[i] / Q[i]) for i in seen) + rest_p * math.log(rest_p / rest_q)
    found = kl(logs(P), logs(Q), TopKTokens(k=1, tokens=TOKEN_SETS[name]))
    assert found.item() == pytest.approx(expected, abs=1e-12)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 12), name=st.sampled_from(sorted(TOKEN_SETS)))
def test_a_coarser_look_never_sees_more_and_never_sees_less_than_nothing(seed, k, name):
    logp, logq = random_logs(seed)
    found = kl(logp, logq, TopKTokens(k=k, tokens=TOKEN_SETS[name]))
    assert (found >= -1e-12).all() and (found <= kl(logp, logq) + 1e-12).all()
    if k >= 9 and name != "xor":
        assert torch.allclose(found, kl(logp, logq), atol=1e-12)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, 9),
    name=st.sampled_from([*sorted(TOKEN_SETS), "whole"]),
    whose=st.sampled_from(sorted(KL_DIRECTIONS)),
)
def test_the_slope_is_what_autograd_says(seed, k, name, whose):
    torch.manual_seed(seed)
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    logq = torch.log_softmax(torch.randn(4, 9, dtype=torch.float64), -1)
    top = None if name == "whole" else TopKTokens(k=k, tokens=TOKEN_SETS[name])
    logp, weigh = torch.log_softmax(logits, -1), KL_DIRECTIONS[whose]
    found = weigh.kl(logp, compute_log_ratios(logp, logq, top))
    (expected,) = torch.autograd.grad(found.sum(), logits)
    with torch.no_grad():
        mine = weigh.grad(logp, compute_log_ratios(logp, logq, top), found)
    assert torch.allclose(mine, expected, atol=1e-12)


@pytest.mark.parametrize("seen", [None, {0}, {0, 2}])
def test_weighed_by_the_teacher_it_is_the_forward_kl(seen):
    kept = {0, 1, 2} if seen is None else seen
    rest = [sum(x for i, x in enumerate(each) if i not in kept) for each in (P, Q)]
    expected = sum(Q[i] * math.log(Q[i] / P[i]) for i in kept) + (
        rest[1] * math.log(rest[1] / rest[0]) if rest[0] else 0
    )
    names = {1: "only-student", 2: "union", 3: None}
    top = None if names[len(kept)] is None else TopKTokens(k=1, tokens=TOKEN_SETS[names[len(kept)]])
    found = forward_kl(logs(P), compute_log_ratios(logs(P), logs(Q), top))
    assert found.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("whose", sorted(KL_DIRECTIONS))
def test_far_apart_and_in_float32_divergences_and_slopes_stay_finite(whose):
    logp, logq = (torch.log_softmax(torch.tensor([row]), -1) for row in ([0.0, 200.0, 0.0], [0.0, 0.0, 200.0]))
    ratio, weigh = compute_log_ratios(logp, logq, None), KL_DIRECTIONS[whose]
    found = weigh.kl(logp, ratio)
    assert found.item() == pytest.approx(200.0) and torch.isfinite(weigh.grad(logp, ratio, found)).all()


def test_a_set_says_as_much_as_the_whole_distribution_of_its_tokens():
    (logp, logq), inside = random_logs(3), [[0, 4, 7], [8, 1, -1], [2, -1, -1], [-1, -1, -1], [5, 3, 6]]
    ids = torch.tensor(inside)
    said = logq.gather(1, ids.clamp(min=0))
    seen = torch.zeros_like(logp, dtype=torch.bool)
    for row, kept in zip(seen, inside, strict=True):
        row[[i for i in kept if i >= 0]] = True
    expected = compute_log_ratios(logp, logq, TopKTokens(k=1, tokens=lambda teacher, student: seen))
    assert torch.allclose(compute_log_ratios_from_topk(logp, ids, said), expected, atol=1e-12)


def test_a_set_of_all_tokens_leaves_no_bucket_and_one_that_holds_everything_a_bounded_one():
    logp, logq = random_logs(1, rows=2, vocab=3)
    everything = torch.arange(3).expand(2, 3)
    assert torch.allclose(compute_log_ratios_from_topk(logp, everything, logq), logp - logq, atol=1e-12)
    sure = compute_log_ratios_from_topk(
        torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0]]), torch.tensor([[0.0]])
    )
    assert sure[0, 0].item() == pytest.approx(math.log(0.5)) and sure[0, 1].item() == pytest.approx(
        math.log(0.5) + 24 * math.log(2)
    )


@given(seed=st.integers(0, 10**6))
def test_what_drawn_tokens_are_worth_is_the_gradient_of_the_kl_on_average(seed):
    torch.manual_seed(seed)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    logq = torch.log_softmax(torch.randn(6, dtype=torch.float64), -1)
    logp = torch.log_softmax(logits, -1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    worth = distillation_advantage(logq, logp.detach())
    (on_average,) = torch.autograd.grad(-(logp.detach().exp() * worth * logp).sum(), logits)
    assert torch.allclose(on_average, exact, atol=1e-12)


def test_a_teacher_that_agrees_teaches_exactly_nothing():
    logp, _ = random_logs(0)
    for top in (None, *(TopKTokens(k=3, tokens=tokens) for tokens in TOKEN_SETS.values())):
        ratio = compute_log_ratios(logp, logp, top)
        assert not ratio.any() and not reverse_kl_grad(logp, ratio, reverse_kl(logp, ratio)).any()


def group(metadata, rewards=(1.0, 0.0)):
    def trajectory(index, reward):
        said = Span(
            author=Author.POLICY,
            tokens=np.array([5, 6], np.int32),
            logprobs=np.array([-1, -2], np.float32),
            version=Version(),
        )
        asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
        return Trajectory(
            index=index,
            branches=((asked, said),),
            status=Status.COMPLETED,
            reward=Reward(value=reward),
        )

    prompt = Prompt(id=7, messages=[{"role": "user", "content": "?"}], metadata=metadata)
    return Group(prompt=prompt, trajectories=tuple(trajectory(i, r) for i, r in enumerate(rewards)))


@pytest.mark.parametrize(("metadata", "number"), [({}, 0), ({"who": "code"}, 2), ({"who": "default"}, 0)])
def test_rows_bear_the_number_of_their_teacher_and_no_reward(metadata, number):
    plain = OutcomeEstimator(advantage_fn=GroupRelativeAdvantages(group_fn=zero_advantages))
    rows = TeacherAssignedEstimator(estimator=plain, names=("default", "math", "code"), key="who")(group(metadata))
    assert len(rows) == 2
    for row in rows:
        assert (row.extras[TEACHER_INDEX] == number).all() and len(row.extras[TEACHER_INDEX]) == 3
        assert not row.advantages.any() and row.mask.tolist() == [False, True, True]


def test_a_prompt_without_a_teacher_is_told_by_its_number():
    prompt = group({"who": "art"}).prompt
    with pytest.raises(DataError, match=r"prompt 7 names teacher art in metadata\['who'\], but the teachers are math"):
        resolve_teacher(prompt, ("math",), "who")
    with pytest.raises(DataError, match=r"prompt 7 names no teacher in metadata\['opd_teacher'\]"):
        resolve_teacher(prompt, ("math",), "opd_teacher")
