"""Trajectories are stamped with what their teacher says of exactly the tokens the policy wrote."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest
from tests.rollout.distill.scoring import scorer, table
from tests.rollout.reward.scripted_server import Fault, serving

from miles.core.errors import EngineError, HookError
from miles.core.protocols import SamplingParams
from miles.core.token_fields import TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS, TOP_TOKENS
from miles.core.types import Author, Prompt, Span, Status, Trajectory, Version
from miles.rollout.distill import scored_generate as module
from miles.rollout.distill.scored_generate import TeacherScoredGenerate
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.reward.context import HTTPEndpoint

V = 31


def span(author, *tokens, tops=None):
    ids = np.array(tokens, np.int32)
    if author is not Author.POLICY:
        return Span(author=author, tokens=ids)
    extras = {} if tops is None else {TOP_TOKENS: np.array(tops, np.int32)}
    zeros = np.zeros(len(ids), np.float32)
    return Span(author=author, tokens=ids, logprobs=zeros, version=Version(), extras=extras)


def policy(*tokens, seed=0, k=None):
    """A span of the policy's, with the ``k`` tokens it would find likeliest."""
    drawn = np.random.default_rng([seed, *tokens])
    tops = None if k is None else [drawn.permutation(V)[:k] for _ in tokens]
    return span(Author.POLICY, *tokens, tops=tops)


def attempt(*branches):
    async def generate(prompt, engine, sampling):
        return Trajectory(branches=branches, status=Status.COMPLETED)

    return generate


def long_branch(k=None):
    return (
        span(Author.PROMPT, 1, 2, 3),
        policy(4, 5, k=k),
        span(Author.ENV, 6, 7),
        policy(8, k=k),
        policy(9, 10, k=k),
        span(Author.ENV, 11),
    )


async def asked(generate, *answers, metadata=None, which=lambda prompt: 0, top=None, **how):
    """The attempt of a prompt, stamped, and what the servers were asked."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serving(answer)) for answer in answers]
        teachers = [
            TeacherClient(str(i), HTTPEndpoint(url=one.url, pause=0.001, **how)) for i, one in enumerate(served)
        ]
        made = TeacherScoredGenerate(generate=generate, teachers=teachers, select_teacher=which, top=top)
        prompt = Prompt(id=1, messages=(), metadata=metadata or {})
        return await made(prompt, None, SamplingParams()), [[a.body for a in one.asked] for one in served]


def run(*args, **how):
    return asyncio.run(asked(*args, **how))


def expected(branch, temperature=1.0):
    """The log-probs of every token of a branch, 0 for the first."""
    tokens = np.concatenate([s.tokens for s in branch])
    logp = table()(tokens, temperature)
    return np.array([0.0, *logp[np.arange(len(tokens) - 1), tokens[1:]]])


def test_each_policy_token_carries_its_log_prob_and_no_other_does():
    trajectory, (bodies,) = run(attempt(long_branch()), scorer(table()))
    (branch,) = trajectory.branches
    assert [s.author for s in branch] == [s.author for s in long_branch()]
    start = 0
    for s in branch:
        if s.author is Author.POLICY:
            assert np.allclose(s.extras[TEACHER_LOGPROB], expected(branch)[start : start + len(s)], atol=1e-6)
            assert s.extras[TEACHER_LOGPROB].dtype == np.float32
        else:
            assert not s.extras
        start += len(s)
    (body,) = bodies
    assert body["input_ids"] == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]] and body["logprob_start_len"] == [2]


def test_branches_are_scored_each_in_its_own_context():
    trajectory, _ = run(attempt(long_branch(), (span(Author.PROMPT, 7), policy(8))), scorer(table()))
    assert np.allclose(trajectory.branches[1][1].extras[TEACHER_LOGPROB], table()([7, 8], 1.0)[0, 8], atol=1e-6)


@pytest.mark.parametrize("branch", [(span(Author.PROMPT, 1, 2),), (policy(1, 2),), (span(Author.PROMPT, 1), policy())])
def test_a_branch_with_nothing_to_train_on_is_left_as_it_is(branch):
    trajectory, (bodies,) = run(attempt(branch), scorer(table()))
    assert trajectory.branches == (branch,) and not bodies


def test_prompts_are_scored_by_the_teacher_they_name():
    def which(prompt):
        return {"a": 0, "b": 1}[prompt.metadata["who"]]

    answers = scorer(table(seed=1)), scorer(table(seed=2))
    found = [run(attempt(long_branch()), *answers, which=which, metadata={"who": who})[1] for who in ("a", "b")]
    assert [[len(bodies) for bodies in one] for one in found] == [[1, 0], [0, 1]]


@pytest.mark.parametrize("most", [1 << 16, 12, 1], ids=["at once", "in parts", "one by one"])
@pytest.mark.parametrize("name", ["only-student", "only-teacher", "intersection", "union", "xor"])
def test_sets_are_those_of_policy_and_teacher_however_they_are_asked_for(monkeypatch, name, most):
    monkeypatch.setattr(module, "MAX_QUERIED_LOGPROBS", most)
    top = TopKSet(k=3, strategy=name, vocab_size=V)
    given = long_branch(k=3)
    trajectory, (bodies,) = run(attempt(given), scorer(table()), top=top, batch=4)
    (branch,) = trajectory.branches
    tokens = np.concatenate([s.tokens for s in branch])
    logp, start = table()(tokens, 1.0), 0
    for before, s in zip(given, branch, strict=True):
        for at in range(len(s)) if s.author is Author.POLICY else ():
            row = logp[start + at - 1]
            own, theirs = set(before.extras[TOP_TOKENS][at].tolist()), set(np.argsort(-row)[:3].tolist())
            wanted = {"only-student": own, "only-teacher": theirs, "intersection": own & theirs, "union": own | theirs,
                      "xor": own ^ theirs}[name]  # fmt: skip
            ids = s.extras[TEACHER_TOKENS][at]
            assert set(ids[ids >= 0].tolist()) == wanted
            assert np.allclose(s.extras[TEACHER_LOGPROBS][at][ids >= 0], row[ids[ids >= 0]], atol=1e-6)
        start += len(s)
        assert TOP_TOKENS not in s.extras
    if most == 1 << 16:
        assert sum(len(body["input_ids"]) for body in bodies) == (3 if top.scores_student_tokens else 1)
    for body in bodies:
        for tokens_sent, first, watch in zip(
            body["input_ids"], body["logprob_start_len"], body.get("token_ids_logprob", []), strict=False
        ):
            assert len(watch) * (len(tokens_sent) - first - 1) <= max(most, len(watch))


def test_a_span_without_the_engines_likeliest_tokens_is_refused_in_a_sentence():
    with pytest.raises(HookError, match=r"--opd-top-k-strategy union needs the engine.s top tokens"):
        run(attempt(long_branch()), scorer(table()), top=TopKSet(k=3, strategy="union", vocab_size=V))


# -- servers that fail ------------------------------------------------------------------------


def test_a_server_that_stumbles_is_asked_again():
    faults = iter([Fault(status=503), Fault(hang_up=True), Fault(raw=b"not json")])
    answer = scorer(table())
    trajectory, (bodies,) = run(attempt(long_branch()), lambda a: next(faults, None) or answer(a), retries=3)
    assert len(bodies) == 4 and TEACHER_LOGPROB in trajectory.branches[0][1].extras


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda a: Fault(status=500), "answered with status 500"),
        (lambda a: Fault(status=400, raw=b"too long"), "answered with status 400 .too long."),
        (lambda a: Fault(hang_up=True), "could not be reached"),
        (lambda a: Fault(stall=True), "did not answer within 0.2 s"),
        (lambda a: {"meta_info": {}}, "did not return one response for each of 1 prompts"),
        (lambda a: [{"meta_info": {}}], "no input_token_logprobs for 8 tokens"),
    ],
)
def test_a_dead_or_wrong_teacher_ends_the_step_with_one_sentence(answer, complaint):
    with pytest.raises(EngineError, match=complaint) as caught:
        run(attempt(long_branch()), answer, retries=1, seconds=0.2)
    said = str(caught.value)
    assert said.startswith("the teacher 0 did not score a trajectory") and "\n" not in said


def test_many_trajectories_go_together_and_never_too_many_at_once():
    async def many():
        async def wait(served):
            for _ in range(3):
                await asyncio.sleep(0)

        async with serving(scorer(table()), wait_for=wait) as served:
            teacher = TeacherClient("x", HTTPEndpoint(url=f"{served.url}/generate", concurrency=2, batch=4))
            made = TeacherScoredGenerate(
                generate=attempt(long_branch()), teachers=[teacher], select_teacher=lambda prompt: 0
            )
            prompt = Prompt(id=1, messages=())
            trajectories = await asyncio.gather(*(made(prompt, None, SamplingParams()) for _ in range(20)))
            return trajectories, served

    trajectories, served = asyncio.run(many())
    first = trajectories[0].branches[0][1].extras[TEACHER_LOGPROB].tolist()
    assert all(t.branches[0][1].extras[TEACHER_LOGPROB].tolist() == first for t in trajectories)
    sizes = [len(a.body["input_ids"]) for a in served.asked]
    assert served.most_at_once <= 2 and sum(sizes) == 20 and max(sizes) <= 4 and len(sizes) < 20
    assert {a.path for a in served.asked} == {"/generate"}


def test_the_teacher_is_asked_at_the_policys_temperature():
    async def one():
        async with serving(scorer(table())) as served:
            teacher = TeacherClient("x", HTTPEndpoint(url=served.url, token="s3cret"), temperature=0.5)
            made = TeacherScoredGenerate(
                generate=attempt(long_branch()), teachers=[teacher], select_teacher=lambda prompt: 0
            )
            return await made(Prompt(id=1, messages=()), None, SamplingParams()), served

    trajectory, served = asyncio.run(one())
    branch = trajectory.branches[0]
    assert np.allclose(branch[1].extras[TEACHER_LOGPROB], expected(branch, 0.5)[3:5], atol=1e-6)
    assert served.asked[0].headers["authorization"] == "Bearer s3cret"


def test_spans_keep_what_they_carried():
    routed = np.zeros((2, 1, 1), np.uint8)
    given = (span(Author.PROMPT, 1), replace(policy(4, 5), extras={"routed_experts": routed}))
    trajectory, _ = run(attempt(given), scorer(table()))
    assert set(trajectory.branches[0][1].extras) == {"routed_experts", TEACHER_LOGPROB}
