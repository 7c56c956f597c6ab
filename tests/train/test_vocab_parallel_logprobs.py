"""Log-probs, entropies and lessons where ranks share the vocabulary and the tokens, against one process with it all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import needs_triton
from tests.pool import ranks
from tests.tiers import examples
from tests.train.tensor_parallel_ranks import Cut, Room, corner, in_threads, loss_of, rows_of

from miles.algo.config import AlgoConfig
from miles.algo.distillation_loss import KL_DIRECTIONS, TOKEN_SETS, TopKTokens
from miles.models.accounting import activations
from miles.train import logprobs as logits
from miles.train import vocab_parallel_logprobs
from miles.train.batch_tensors import MicroBatch, TeacherLogprobs
from miles.train.distillation import LocalTeachers, ServedTeachers, TeacherOutput, build_teachers
from miles.train.logprobs import HeadOutput, compute_logprobs


def material(rows, width, vocab, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    hidden = (2 * torch.randn(rows, width, dtype=dtype)).requires_grad_()
    head = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    return HeadOutput(hidden_RD=hidden, head_VD=head), torch.randint(0, vocab, (rows,))


def plain(output, target, temperature):
    """Torch's own, with all logits at once."""
    logits = output.hidden_RD @ output.head_VD.T
    if output.softcap is not None:
        logits = output.softcap * torch.tanh(logits / output.softcap)
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def on_a_rank(whole, target, weights, used, how, rank, world, room):
    """Values, and the gradients of the hidden states and of this rank's rows."""
    head, vocabulary = rows_of(whole.head_VD, rank, world, room)
    hidden = whole.hidden_RD.detach().clone().requires_grad_()
    output = replace(whole, hidden_RD=hidden, head_VD=head, vocabulary=vocabulary)
    logp, entropy = compute_logprobs(output, target, **how)
    grads = torch.autograd.grad(loss_of(logp, entropy, weights, used), (hidden, head))
    return logp.detach(), entropy.detach(), *grads


def agree(parts, whole, target, weights, used, temperature, close):
    logp, entropy = plain(whole, target, temperature)
    grads = torch.autograd.grad(loss_of(logp, entropy, weights, used), (whole.hidden_RD, whole.head_VD))
    for mine, their_entropy, hidden, _ in parts:
        for a, b in ((mine, logp), (their_entropy, entropy), (hidden, grads[0])):
            assert torch.allclose(a, b, **close)
        assert torch.equal(mine, parts[0][0]) and torch.equal(hidden, parts[0][2])
    rows = torch.cat([head for *_, head in parts])
    vocab = len(whole.head_VD)
    assert torch.allclose(rows[:vocab], grads[1], **close) and not rows[vocab:].any()


@settings(max_examples=examples(60), deadline=None)
@given(
    world=st.integers(1, 4),
    rows=st.integers(0, 9),
    vocab=st.integers(1, 23),
    chunk=st.sampled_from([None, 1, 2, 5]),
    temperature=st.sampled_from([1.0, 0.6]),
    softcap=st.sampled_from([None, 3.0]),
    used=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)]),
)
def test_ranks_with_some_rows_each_reckon_what_one_with_all_does(world, rows, vocab, chunk, temperature, softcap, used):
    whole, target = material(rows, 4, vocab, seed=rows + 31 * vocab)
    whole = replace(whole, softcap=softcap)
    weights, room = torch.randn(2, rows, dtype=torch.float64), Room(world)
    how = {"temperature": temperature, "chunk": chunk}
    parts = in_threads(world, lambda r: on_a_rank(whole, target, weights, used, how, r, world, room))
    agree(parts, whole, target, weights, used, temperature, {"rtol": 1e-9, "atol": 1e-10})


def test_float32_is_as_good_as_plain_float32_and_larger_logits_overflow_nothing():
    whole, target = material(40, 16, 301, dtype=torch.float32)
    whole = replace(whole, hidden_RD=(8 * whole.hidden_RD).detach().requires_grad_())
    weights, room = torch.randn(2, 40), Room(3)
    parts = in_threads(3, lambda r: on_a_rank(whole, target, weights, (1.0, 0.1), {"chunk": 7}, r, 3, room))
    agree(parts, whole, target, weights, (1.0, 0.1), 1.0, {"rtol": 2e-4, "atol": 2e-4})


def test_low_precision_rows_give_float32_log_probs_and_low_precision_gradients():
    whole, target = material(12, 8, 21, dtype=torch.bfloat16)
    room, weights = Room(2), torch.randn(2, 12)
    parts = in_threads(2, lambda r: on_a_rank(whole, target, weights, (1.0, 0.0), {"chunk": 5}, r, 2, room))
    exact, _ = plain(replace(whole, hidden_RD=whole.hidden_RD.float(), head_VD=whole.head_VD.float()), target, 1.0)
    for logp, entropy, hidden, head in parts:
        assert logp.dtype == entropy.dtype == torch.float32 and hidden.dtype == head.dtype == torch.bfloat16
        assert torch.allclose(logp, exact, atol=1e-5)


def test_few_sums_are_asked_for_and_none_a_chunk_in_the_backward():
    whole, target = material(12, 4, 10)
    calls = []

    def count(rank, x):
        calls.append(tuple(x.shape))
        return [x]

    head, vocabulary = rows_of(whole.head_VD, 0, 1, count)
    logp, _ = compute_logprobs(replace(whole, head_VD=head, vocabulary=vocabulary), target, chunk=3)
    assert calls == [(3,), (3, 3)] * 4
    logp.sum().backward()
    assert calls[8:] == [(12, 4)]


# -- over a process group, tokens cut as well -------------------------------------------------


def test_tokens_and_rows_cut_over_processes_give_the_whole_on_each():
    whole, target = material(11, 6, 13)
    whole, weights = replace(whole, softcap=4.0), torch.randn(2, 11, dtype=torch.float64)
    found = ranks(4, corner, whole.hidden_RD.detach(), whole.head_VD.detach(), target, weights)
    logp, entropy = plain(whole, target, 0.8)
    hidden, head = torch.autograd.grad(loss_of(logp, entropy, weights, (1.0, 0.2)), (whole.hidden_RD, whole.head_VD))
    for mine, their_entropy, vocab, mine_r, grad, _ in found:
        assert vocab == 13 and torch.allclose(mine, logp) and torch.allclose(their_entropy, entropy)
        assert torch.allclose(grad, hidden[mine_r])
    # A row's gradient is the sum over the ranks with other tokens.
    rows = torch.cat([found[0][-1] + found[2][-1], found[1][-1] + found[3][-1]])
    assert torch.allclose(rows[:13], head) and not rows[13:].any()


# -- lessons ----------------------------------------------------------------------------------

SAMPLES = (3, 5, 2, 4)
VOCAB = 9


def rows_with(target, teacher_logprobs=None, teacher_indices=()):
    blank = torch.zeros(len(target))
    sample_R = torch.repeat_interleave(torch.arange(len(SAMPLES)), torch.tensor(SAMPLES))
    return MicroBatch(
        lengths=SAMPLES,
        tokens_T=target,
        positions_T=torch.cat([torch.arange(n) for n in SAMPLES]),
        before_R=torch.arange(len(target)),
        target_R=target,
        engine_logp_R=blank,
        advantage_R=blank,
        oldest_R=blank.int(),
        weight_R=blank,
        mean_R=blank,
        sample_R=sample_R,
        trained_B=torch.tensor(SAMPLES),
        replay_TLk=None,
        teacher_indices=teacher_indices,
        teacher_logprobs=teacher_logprobs,
    )


def zigzag(lengths, world):
    """Which tokens each of ``world`` ranks has: of every sequence a stretch, so that parts of rows are cut anew."""
    places = [[] for _ in range(world)]
    start = 0
    for n in lengths:
        for i in range(n):
            places[i * world // n].append(start + i)
        start += n
    return [torch.tensor(p, dtype=torch.int64) for p in places]


class Fixed:
    """A teacher whose hidden states follow from the tokens alone, so that any part of the rows may be asked for."""

    def __init__(self, seed, vocab, width=6):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB, width, dtype=torch.float64, generator=generator)
        self.head = torch.randn(vocab, width, dtype=torch.float64, generator=generator)

    def output(self, rows, cut=None, shared=None):
        hidden, head, vocabulary, tokens = self.table[rows.tokens_T], self.head, None, None
        if cut is not None:
            tokens = Cut(zigzag(rows.lengths, 2), *cut)
            hidden = hidden[tokens.mine_r]
        if shared is not None:
            head, vocabulary = rows_of(head, *shared)
        return HeadOutput(hidden_RD=hidden, head_VD=head.detach(), vocabulary=vocabulary, tokens=tokens)


def lesson_on(policy, rows, teaching, cut=None, shared=None):
    (heard,) = teaching.forward([rows], lambda model, own: {0: model.output(own[0], cut, shared)})
    return teaching.compute_terms(heard, policy, rows)


def taught(policy, rows, teaching, weights):
    """What the whole thing comes to in one process."""
    lesson = lesson_on(policy, rows, teaching)
    if lesson.kl_R is None:
        return lesson.teacher_logp_R, None, None, None
    grads = torch.autograd.grad((weights * lesson.kl_R).sum(), (policy.hidden_RD, policy.head_VD))
    return lesson.teacher_logp_R, lesson.kl_R.detach(), *grads


def taught_here(whole, rows, teaching, weights, rank, rooms):
    context, tensor = divmod(rank, 2)
    head, vocabulary = rows_of(whole.head_VD, tensor, 2, rooms[context])
    tokens = Cut(zigzag(rows.lengths, 2), context, rooms[2 + tensor])
    hidden = whole.hidden_RD.detach()[tokens.mine_r].clone().requires_grad_()
    policy = replace(whole, hidden_RD=hidden, head_VD=head, vocabulary=vocabulary, tokens=tokens)
    lesson = lesson_on(policy, rows, teaching, (context, rooms[2 + tensor]), (tensor, 2, rooms[context]))
    if lesson.kl_R is None:
        return lesson.teacher_logp_R, None, None, None
    grads = torch.autograd.grad((weights * lesson.kl_R).sum(), (hidden, head))
    return lesson.teacher_logp_R, lesson.kl_R.detach(), *grads


def compare(whole, rows, teaching):
    rooms, weights = [Room(2) for _ in range(4)], torch.randn(len(rows.target_R), dtype=torch.float64)
    said, kl, hidden, head = taught(whole, rows, teaching, weights)
    found = in_threads(4, lambda rank: taught_here(whole, rows, teaching, weights, rank, rooms))
    for mine, own_kl, _, _ in found:
        assert torch.allclose(mine, said)
        assert (kl is None) == (own_kl is None) and (kl is None or torch.allclose(own_kl, kl))
    if kl is not None:
        for rank, mine_r in enumerate(zigzag(rows.lengths, 2)):
            assert torch.allclose(found[2 * rank][2], hidden[mine_r]) and torch.allclose(
                found[2 * rank + 1][2], hidden[mine_r]
            )
        parts = torch.cat([found[0][3] + found[2][3], found[1][3] + found[3][3]])
        assert torch.allclose(parts[:VOCAB], head) and not parts[VOCAB:].any()


HOW = {"coef": 0.7, "temperature": 0.9, "chunk": 3}


@pytest.mark.parametrize("mode", ["sampled", "whole", "top", "forward"])
@pytest.mark.parametrize("numbers", [(), (1, 0, 1, 0)], ids=["one teacher", "two teachers"])
def test_lessons_over_ranks_are_those_of_one_process(mode, numbers):
    whole, target = material(sum(SAMPLES), 5, VOCAB)
    whole = replace(whole, softcap=5.0)
    top = TopKTokens(k=3, tokens=TOKEN_SETS["union"]) if mode == "top" else None
    weigh = KL_DIRECTIONS["teacher_p" if mode == "forward" else "student_p"]
    # The second teacher's vocabulary is padded beyond the policy's.
    models = [Fixed(1, VOCAB), Fixed(2, VOCAB + 4, width=7)]
    teaching = LocalTeachers(models=models, exact=mode != "sampled", top=top, direction=weigh, **HOW)
    compare(whole, rows_with(target, teacher_indices=numbers), teaching)


def test_what_served_teachers_said_is_learnt_from_alike():
    whole, target = material(sum(SAMPLES), 5, VOCAB)
    logq = torch.randn(len(target), VOCAB).log_softmax(-1)
    chosen = logq.topk(4, -1).indices
    chosen[::3, -1] = -1
    said = logq.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0)
    reported = TeacherLogprobs(logp_R=logq.gather(1, target[:, None])[:, 0], set_RS=chosen, set_logp_RS=said)
    compare(whole, rows_with(target, teacher_logprobs=reported), ServedTeachers(exact=True, **HOW))


def test_a_teacher_without_a_sample_is_read_where_ranks_must_keep_in_step():
    _, target = material(sum(SAMPLES), 5, VOCAB)
    asked = []

    def output_of(model, rows):
        asked.append((model, rows[0].lengths))
        return {0: model}

    for in_step in (False, True):
        teaching = LocalTeachers(models=["a", "b"], in_step=in_step, **HOW)
        (heard,) = teaching.forward([rows_with(target, teacher_indices=(1, 1, 1, 1))], output_of)
        assert heard == [TeacherOutput(teacher="b", index_R=None)]
    assert asked == [("b", SAMPLES), ("a", (2,)), ("b", SAMPLES)]


def test_ranks_with_other_samples_are_what_teachers_keep_in_step_with():
    class Two:
        dp_rank, dp_size, is_lead = 0, 2, True

    config = AlgoConfig(advantage_estimator="on_policy_distillation")
    alone, among = (
        build_teachers(config, [object()], temperature=1.0, chunk=None, **more) for more in ({}, {"dp_group": Two()})
    )
    assert isinstance(alone, LocalTeachers) and not alone.in_step
    assert isinstance(among, LocalTeachers) and among.in_step


CUTS = [(1, 11, None), (1, 11, 3), (3, 10, 4), (4, 5, None)]
SCALES = [(1.0, None), (0.7, 4.0)]
USED = [(1.0, 0.0), (1.0, 0.3)]
# The interpreter is slow: every two choices meet every day, all three among the slow tests.
CELLS = [
    pytest.param(*cut, *scale, used, marks=() if (i + j + k) % 2 == 0 else pytest.mark.slow)
    for i, cut in enumerate(CUTS)
    for j, scale in enumerate(SCALES)
    for k, used in enumerate(USED)
]


@needs_triton
@pytest.mark.parametrize(("world", "vocab", "chunk", "temperature", "softcap", "used"), CELLS)
def test_device_code_gives_the_same(monkeypatch, world, vocab, chunk, temperature, softcap, used):
    monkeypatch.setattr(logits, "use_triton_training", lambda x: True)
    whole, target = material(7, 4, vocab, dtype=torch.float32)
    whole = replace(whole, softcap=softcap)
    weights, how = torch.randn(2, 7), {"temperature": temperature, "chunk": chunk}
    if world == 1:
        found = compute_logprobs(whole, target, **how)
        wanted = plain(whole, target, temperature)
        inputs = (whole.hidden_RD, whole.head_VD)
        pairs = [torch.autograd.grad(loss_of(*each, weights, used), inputs) for each in (found, wanted)]
        for mine, theirs in (*zip(found, wanted, strict=True), *zip(*pairs, strict=True)):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        return
    # The interpreter serves one thread at a time, so the ranks take turns at what each would give.
    rounds, parts = [[] for _ in range(world)], []
    for _ in range(4):
        parts = [on_a_rank(whole, target, weights, used, how, r, world, Replay(r, rounds)) for r in range(world)]
    agree(parts, whole, target, weights, used, temperature, {"rtol": 1e-4, "atol": 1e-5})


class Replay:
    """An exchange with what the others gave last time: after as many rounds as there are exchanges all is right."""

    def __init__(self, rank, rounds):
        self.rank, self.rounds, self.number = rank, rounds, 0

    def __call__(self, rank, x):
        own = self.rounds[rank]
        if self.number == len(own):
            own.append(x.detach().clone())
        own[self.number] = x.detach().clone()
        found = [each[self.number] if self.number < len(each) else x for each in self.rounds]
        self.number += 1
        return found


@needs_triton
@pytest.mark.parametrize(("world", "vocab", "temperature", "softcap"), [(1, 11, 1.0, None), (3, 10, 0.7, 4.0)])
@pytest.mark.parametrize("used", USED)
def test_logits_are_computed_once_where_their_gradients_are_kept(monkeypatch, world, vocab, temperature, softcap, used):
    monkeypatch.setattr(logits, "use_triton_training", lambda x: True)
    monkeypatch.setattr(logits, "default_chunk_size", lambda head: 2)  # two chunks, since fused ones are twice as large
    monkeypatch.setattr(activations, "MAX_KEPT_LOGIT_GRADS", 7 * vocab)
    computed = []
    compute = vocab_parallel_logprobs.compute_logits
    monkeypatch.setattr(
        vocab_parallel_logprobs,
        "compute_logits",
        lambda x, *rest, **how: computed.append(x) or compute(x, *rest, **how),
    )
    whole, target = material(7, 4, vocab, dtype=torch.float32)
    whole = replace(whole, softcap=softcap)
    weights, how = torch.randn(2, 7), {"temperature": temperature, "max_tokens": 7}
    rounds, parts = [[] for _ in range(world)], []
    for _ in range(1 if world == 1 else 4):
        computed.clear()
        parts = [on_a_rank(whole, target, weights, used, how, r, world, Replay(r, rounds)) for r in range(world)]
    # A gradient of entropies needs the logits again.
    assert len(computed) == world * 2 * (2 if used[1] else 1)
    agree(parts, whole, target, weights, used, temperature, {"rtol": 1e-4, "atol": 1e-5})


@needs_triton
def test_without_room_for_their_gradients_logits_are_computed_again(monkeypatch):
    monkeypatch.setattr(logits, "use_triton_training", lambda x: True)
    monkeypatch.setattr(activations, "MAX_KEPT_LOGIT_GRADS", 7 * 11 - 1)
    monkeypatch.setattr(logits, "write_unit_grads", None)
    whole, target = material(7, 4, 11, dtype=torch.float32)
    assert compute_logprobs(whole, target, max_tokens=7)[0].requires_grad
    monkeypatch.setattr(activations, "MAX_KEPT_LOGIT_GRADS", 7 * 11)
    with torch.no_grad():
        compute_logprobs(whole, target, max_tokens=7)
    compute_logprobs(whole, target, max_tokens=7, chunk=4)
