"""The chunked reverse KL against plain autograd, and distilling steps against transformers and against themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.train.small_trainer import DENSE, distance, model, ragged, sample, step, twin, weights, worker

from miles.algo.distillation_loss import TEACHER_INDEX, TOKEN_SETS, TopKTokens, compute_log_ratios
from miles.algo.distillation_loss import reverse_kl as vocab_reverse_kl
from miles.train.distillation import LocalComparison, compute_teacher_kl
from miles.train.logprobs import HeadOutput, TrainedHeadLora

MODES = {"sampled": {}, "whole": {"opd_log_prob_top_k": -1}, "top": {"opd_log_prob_top_k": 5}}
TOPS = [None, *(TopKTokens(k=3, tokens=tokens) for tokens in TOKEN_SETS.values())]


def material(dtype=torch.float64, rows=7, width=5, wider=6, vocab=11):
    torch.manual_seed(0)
    policy = HeadOutput(
        hidden_RD=torch.randn(rows, width, dtype=dtype, requires_grad=True),
        head_VD=torch.randn(vocab, width, dtype=dtype, requires_grad=True),
    )
    teacher = HeadOutput(
        hidden_RD=torch.randn(rows, wider, dtype=dtype), head_VD=torch.randn(vocab, wider, dtype=dtype)
    )
    return policy, teacher, torch.randint(0, vocab, (rows,))


def reverse_kl(policy, teacher, target, *, temperature=1.0, top=None, chunk=None):
    judge = LocalComparison(teacher=teacher, target_R=target, temperature=temperature, top=top)
    return compute_teacher_kl(policy, judge, temperature=temperature, chunk=chunk)


def plain(output, temperature):
    logits = output.hidden_RD @ output.head_VD.T
    bounded = logits if output.softcap is None else output.softcap * torch.tanh(logits / output.softcap)
    return torch.log_softmax(bounded / temperature, -1)


@pytest.mark.parametrize("top", TOPS, ids=["whole", *TOKEN_SETS])
@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 2.0)])
def test_values_and_gradients_equal_plain_autograd_however_it_is_chunked(top, chunk, temperature, softcap):
    policy, teacher, target = material()
    policy = replace(policy, softcap=softcap)
    weight = torch.randn(7, dtype=torch.float64)
    mine, said = reverse_kl(policy, teacher, target, temperature=temperature, top=top, chunk=chunk)
    logp, logq = plain(policy, temperature), plain(teacher, temperature)
    theirs = vocab_reverse_kl(logp, compute_log_ratios(logp, logq, top))
    assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    assert torch.allclose(said, logq.gather(1, target[:, None])[:, 0], rtol=1e-12) and not said.requires_grad
    inputs = (policy.hidden_RD, policy.head_VD)
    for a, b in zip(
        torch.autograd.grad((weight * mine).sum(), inputs),
        torch.autograd.grad((weight * theirs).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("chunk", "merged"), [(None, False), (3, False), (3, True)])
def test_an_adapter_of_the_head_has_the_gradients_of_plain_autograd(chunk, merged):
    policy, teacher, target = material()
    a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5), (11, 2)))
    base = policy.head_VD.detach()
    whole = base + 0.5 * b @ a
    lora = TrainedHeadLora(a_XD=a, b_VX=b, scale=0.5, merged=merged)
    own = replace(policy, head_VD=whole.detach() if merged else base, softcap=2.0, lora=lora)
    mine, _ = reverse_kl(own, teacher, target, chunk=chunk)
    logp, logq = plain(replace(policy, head_VD=whole, softcap=2.0), 1.0), plain(teacher, 1.0)
    theirs = vocab_reverse_kl(logp, compute_log_ratios(logp, logq, None))
    assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
    inputs = (policy.hidden_RD, a, b)
    for one, two in zip(
        torch.autograd.grad(mine.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs), strict=True
    ):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 3])
def test_gradients_pass_the_finite_difference_check(chunk):
    policy, teacher, target = material()

    def kl(hidden, head):
        return reverse_kl(HeadOutput(hidden_RD=hidden, head_VD=head), teacher, target, temperature=1.3, chunk=chunk)[0]

    assert torch.autograd.gradcheck(kl, (policy.hidden_RD, policy.head_VD))


def test_low_precision_gives_float32_divergences_and_no_rows_are_no_trouble():
    policy, teacher, target = material(torch.bfloat16)
    kl, _ = reverse_kl(policy, teacher, target, chunk=2)
    assert kl.dtype == torch.float32
    grads = torch.autograd.grad(kl.sum(), (policy.hidden_RD, policy.head_VD))
    assert all(g.dtype == torch.bfloat16 for g in grads)
    none, _ = reverse_kl(
        replace(policy, hidden_RD=policy.hidden_RD[:0]), replace(teacher, hidden_RD=teacher.hidden_RD[:0]), target[:0]
    )
    assert none.shape == (0,)
    none.sum().backward()


def distiller(actor, *teachers, mode="sampled", algo=None, **more):
    knobs = {"advantage_estimator": "on_policy_distillation"} | MODES[mode] | (algo or {})
    return worker(actor, algo=knobs, teachers=teachers, **more)


def logps(reference, s, temperature):
    tokens = torch.from_numpy(s.tokens.astype(np.int64))
    logp = torch.log_softmax(reference(tokens[None]).logits[0].float() / temperature, -1)
    at = torch.from_numpy(np.flatnonzero(s.mask))
    return logp[at - 1], tokens[at]


def twins(folder, *models):
    folders = [folder / str(number) for number in range(len(models))]
    for each in folders:
        each.mkdir()
    return [twin(one, each) for one, each in zip(models, folders, strict=True)]


def silent(samples):
    """As the credit of this estimator leaves them: worth nothing by themselves."""
    return [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]


def test_a_whole_divergence_is_that_of_transformers(tmp_path):
    actor, teacher = model(), model(seed=1, frozen=True)
    own, other = twins(tmp_path, actor, teacher)
    samples = ragged(5)
    expected, said = [], []
    with torch.no_grad():
        for s in samples:
            (p, drawn), (q, _) = logps(own, s, 0.8), logps(other, s, 0.8)
            expected.append((p.exp() * (p - q)).sum(-1).mean())
            said.append(q.gather(1, drawn[:, None]).mean())
    report = step(distiller(actor, teacher, mode="whole", temperature=0.8), silent(samples))
    assert report.metrics["distill_kl"] == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)
    assert report.metrics["teacher_logp"] == pytest.approx(float(torch.stack(said).mean()), rel=1e-4)
    assert report.metrics["loss"] == pytest.approx(report.metrics["distill_kl"], rel=1e-5)


def test_a_drawn_token_is_worth_what_the_teacher_finds_it_likelier(tmp_path):
    actor, teacher = model(), model(seed=1, frozen=True)
    own, other = twins(tmp_path, actor, teacher)
    samples = ragged(5)
    worth = []
    with torch.no_grad():
        for s in samples:
            (p, drawn), (q, _) = logps(own, s, 1.0), logps(other, s, 1.0)
            given = np.zeros(len(s), np.float32)
            given[s.mask] = 0.5 * (q - p).gather(1, drawn[:, None])[:, 0].numpy()
            worth.append(replace(s, advantages=given))
    # The same step as with these advantages, given by hand; the rewards' own are no part of it.
    taught, reported = distiller(actor, teacher, algo={"opd_kl_coef": 0.5}), worker(model())
    report = step(taught, silent(samples))
    step(reported, worth)
    assert distance(weights(taught), weights(reported)) < 1e-6
    mean = np.mean([-2 * s.advantages[s.mask].mean() for s in worth])
    assert report.metrics["distill_kl"] == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_teacher_that_is_the_policy_has_no_gradient_at_all(mode):
    actor = model()
    report = step(distiller(actor, model(frozen=True), mode=mode, temperature=0.7), silent(ragged(6)))
    assert report.metrics["grad_norm"] == 0.0 and report.metrics["distill_kl"] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [{"max_tokens_per_gpu": 16}, {"micro_batch_size": 1}, {"log_probs_chunk_size": 2}])
def test_how_a_batch_is_cut_changes_nothing(mode, cut):
    whole, parts = (distiller(model(), model(seed=1, frozen=True), mode=mode, train=how) for how in ({}, cut))
    samples = ragged(8)
    one, other = step(whole, samples), step(parts, samples)
    assert distance(weights(whole), weights(parts)) < 1e-6
    for name in ("distill_kl", "teacher_logp", "loss", "grad_norm"):
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-6)


def taught_by(s, number):
    return replace(s, extras={TEACHER_INDEX: np.full(len(s), number, np.int16)})


@pytest.mark.parametrize("mode", MODES)
def test_each_sample_is_scored_by_its_own_teacher(mode):
    samples = ragged(6)
    numbers = [1, 0, 1, 1, 0, 0]
    teachers = [model(seed=1, frozen=True), model({**DENSE, "hidden_size": 24, "vocab_size": 40}, seed=2, frozen=True)]

    def update(samples, *teachers):
        trainer = distiller(model(), *teachers, mode=mode, train={"clip_grad": 1e9})
        return step(trainer, samples).metrics

    mixed = update([taught_by(s, n) for s, n in zip(samples, numbers, strict=True)], *teachers)
    alone = [update([s for s, n in zip(samples, numbers, strict=True) if n == i], teachers[i]) for i in (0, 1)]
    for name in ("distill_kl", "teacher_logp"):
        assert mixed[name] == pytest.approx((alone[0][name] + alone[1][name]) / 2, rel=1e-5)
    again = update([taught_by(s, 1) for s in samples], *teachers)
    assert again["distill_kl"] == pytest.approx(update(samples, teachers[1])["distill_kl"], rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_rewards_are_worth_is_added_to_what_the_teacher_says(mode):
    knobs = {"advantage_estimator": "grpo", "use_opd": True, "opd_kl_coef": 0.0}
    beside, plain_one = distiller(model(), model(seed=1, frozen=True), mode=mode, algo=knobs), worker(model())
    samples = ragged(4)
    report = step(beside, samples)
    step(plain_one, samples)
    assert distance(weights(beside), weights(plain_one)) < 1e-7 and report.metrics["distill_kl"] != 0


@pytest.mark.parametrize("mode", MODES)
def test_step_after_step_the_policy_comes_nearer_to_its_teacher(mode):
    actor, teacher = model(), model(seed=1, frozen=True)
    trainer = distiller(actor, teacher, mode=mode, steps=2, updates=60, train={"lr": 3e-3, "adam_eps": 1e-8})
    rng = np.random.default_rng(0)
    seen = []
    for number in range(25):
        seen.append(step(trainer, drawn_by(actor, rng, number), number).metrics["distill_kl"])
    assert np.mean(seen[-5:]) < 0.7 * np.mean(seen[:5])


@torch.no_grad()
def drawn_by(actor, rng, version, count=16):
    """Samples that the policy itself wrote."""
    blank = [sample(rng, prompt=2, reply=6, advantage=0.0, version=version, trajectory=i) for i in range(count)]
    tokens = np.stack([s.tokens for s in blank])
    logprobs = np.zeros(tokens.shape, np.float32)
    for at in range(2, 8):
        context = torch.from_numpy(tokens[:, :at].astype(np.int64))
        read = actor.read(context.flatten(), torch.arange(at).repeat(count), (at,) * count, None)
        logp = torch.log_softmax(read.hidden_TD[at - 1 :: at] @ actor.head().T, -1)
        drawn = [rng.choice(31, p=p / p.sum()) for p in logp.double().exp().numpy()]
        tokens[:, at], logprobs[:, at] = drawn, logp.numpy()[np.arange(count), drawn]
    return [replace(s, tokens=said, logprobs=logs) for s, said, logs in zip(blank, tokens, logprobs, strict=True)]
