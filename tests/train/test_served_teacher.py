"""A teacher elsewhere, of whom only what it said is known, teaches what the same teacher teaches when it is here."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.rollout.distill.scoring import scorer
from tests.rollout.reward.scripted_server import serving
from tests.train.small_trainer import distance, model, ragged, step, weights, worker

from miles.algo.advantages import build_samples
from miles.core.errors import MilesError
from miles.core.protocols import SamplingParams
from miles.core.token_fields import TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS, TOP_TOKENS
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory, Version
from miles.rollout.distill.scored_generate import TeacherScoredGenerate
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.reward.context import HTTPEndpoint

TEMPERATURE = 0.8
SETS = ("only-student", "only-teacher", "intersection", "union", "xor")


def logps_of(here):
    """What a model here says, to be served."""

    @torch.no_grad()
    def logps(tokens, temperature):
        ids = torch.tensor(tokens)
        read = here.read(ids, torch.arange(len(ids)), [len(ids)], None)
        return torch.log_softmax(read.hidden_TD @ here.head().T / temperature, -1).double().numpy()

    return logps


def spans_of(s, student, k):
    """A sample as the trajectory it was: its reply with the tokens the policy found likeliest."""
    logp = logps_of(student)(s.tokens, TEMPERATURE)[:-1]
    top = np.argsort(-logp, axis=-1, kind="stable")[:, :k].astype(np.int32)
    start = int(s.mask.argmax())
    asked = Span(author=Author.PROMPT, tokens=s.tokens[:start].copy())
    reply = Span(
        author=Author.POLICY,
        tokens=s.tokens[start:].copy(),
        logprobs=s.logprobs[start:].copy(),
        version=Version(),
        extras={TOP_TOKENS: top[start - 1 :]},
    )
    return asked, reply


def taught(samples, student, here, top):
    """The same samples as they come back from a rollout whose teacher is served."""

    async def fetch():
        async with serving(scorer(logps_of(here))) as served:
            teacher = TeacherClient("x", HTTPEndpoint(url=served.url, batch=3), temperature=TEMPERATURE)
            rows = []
            for s in samples:

                async def generate(prompt, engine, sampling, s=s):
                    branch = spans_of(s, student, top.k if top else 1)
                    return Trajectory(branches=(branch,), status=Status.COMPLETED, reward=Reward(value=0.0))

                made = TeacherScoredGenerate(
                    generate=generate, teachers=[teacher], select_teacher=lambda prompt: 0, top=top
                )
                trajectory = replace(await made(Prompt(id=0, messages=()), None, SamplingParams()), index=s.trajectory)
                rows += build_samples(0, trajectory, advantage=0.0, trained_author=Author.POLICY)
            return rows

    return asyncio.run(fetch())


def knobs(**more):
    return {"advantage_estimator": "on_policy_distillation", **more}


@pytest.mark.parametrize("whose", ["student_p", "teacher_p"])
@pytest.mark.parametrize("strategy", ["sampled", *SETS])
def test_a_served_teacher_gives_the_loss_and_the_gradient_of_one_that_is_held(strategy, whose):
    if strategy == "sampled" and whose != "student_p":
        pytest.skip("a drawn token has no weight")
    k = 0 if strategy == "sampled" else 4
    top = TopKSet(k=k, strategy=strategy, vocab_size=31) if k else None
    algo = knobs(opd_log_prob_top_k=k, opd_reward_weight_mode=whose) | ({"opd_top_k_strategy": strategy} if k else {})
    actor, teacher = model(), model(seed=1, frozen=True)
    samples = [replace(s, advantages=np.zeros_like(s.advantages)) for s in ragged(6)]
    reported = taught(samples, actor, teacher, top)
    how = {"algo": algo, "temperature": TEMPERATURE, "train": {"clip_grad": 1e9, "max_tokens_per_gpu": 24}}
    held, served = worker(model(), teachers=[teacher], **how), worker(model(), **how)
    one, other = step(held, samples), step(served, reported)
    for name in ("loss", "distill_kl", "teacher_logp", "grad_norm"):
        assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5, abs=1e-5)
    # Adam's first update with a large epsilon is as smooth as the gradient.
    assert distance(weights(held), weights(served)) < 1e-5 and one.metrics["grad_norm"] > 0


def keep(grads, name, parameter):
    grads[name] = parameter.grad.clone()


def test_gradients_agree_parameter_by_parameter():
    """As above with the gradients themselves, and not what an optimizer makes of them."""
    found = []
    actor, teacher = model(), model(seed=1, frozen=True)
    samples = ragged(6)
    top = TopKSet(k=4, strategy="union", vocab_size=31)
    for teachers, rows in (([teacher], samples), ([], taught(samples, actor, teacher, top))):
        rows = [replace(r, advantages=np.zeros_like(r.advantages)) for r in rows]
        mine = model()
        algo = knobs(opd_log_prob_top_k=4, opd_top_k_strategy="union")
        trainer = worker(
            mine, algo=algo, teachers=teachers, temperature=TEMPERATURE, train={"lr": 0.0, "clip_grad": 0.0}
        )
        found.append({})
        for name, p in mine.parameters().items():
            p.register_post_accumulate_grad_hook(partial(keep, found[-1], name))
        step(trainer, rows)
    largest = max(float(g.abs().max()) for g in found[0].values())
    assert found[0].keys() == found[1].keys() and distance(found[0], found[1]) < 1e-5 * largest


def test_rows_without_what_a_teacher_said_are_refused_by_name():
    trainer = worker(model(), algo=knobs())
    with pytest.raises(MilesError, match="the samples have no teacher log-probs"):
        step(trainer, ragged(2))
    whole = [replace(s, extras={TEACHER_LOGPROB: np.zeros(len(s), np.float32)}) for s in ragged(2)]
    with pytest.raises(MilesError, match="trajectory 1 of prompt 0 lacks its teacher's log-probs"):
        step(trainer, [whole[0], replace(whole[1], extras={})])
    with pytest.raises(MilesError, match="the samples have no teacher log-probs"):
        step(worker(model(), algo=knobs(opd_log_prob_top_k=2)), whole)


def test_what_a_teacher_said_is_cut_with_the_samples():
    samples = [
        replace(
            s,
            extras={
                TEACHER_LOGPROB: -np.arange(len(s), dtype=np.float32),
                TEACHER_TOKENS: np.stack([s.tokens, np.full(len(s), -1, np.int32)], 1),
                TEACHER_LOGPROBS: np.stack([-np.arange(len(s), dtype=np.float32), np.zeros(len(s), np.float32)], 1),
            },
        )
        for s in ragged(7)
    ]
    whole, parts = (
        worker(model(), algo=knobs(opd_log_prob_top_k=1), train=how) for how in ({}, {"micro_batch_size": 1})
    )
    one, other = step(whole, samples), step(parts, samples)
    expected = np.mean([-np.flatnonzero(s.mask).mean() for s in samples])
    assert one.metrics["teacher_logp"] == pytest.approx(expected, rel=1e-5)
    assert other.metrics["distill_kl"] == pytest.approx(one.metrics["distill_kl"], rel=1e-5)
    assert distance(weights(whole), weights(parts)) < 1e-6
