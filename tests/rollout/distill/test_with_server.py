"""A teacher behind our own server: what it says is what the same checkpoint says when the trainer holds it."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.backends.native.server.live import served, serving
from tests.backends.native.server.tiny import VOCABULARY, write_model
from tests.server_api.live_servers import sglang
from tests.train.small_trainer import distance, sample, step, worker
from tests.train.test_served_teacher import TEMPERATURE, keep, knobs, logps_of, spans_of

from miles.algo.advantages import build_samples
from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import EngineError, UsageError
from miles.core.media import PlacedImage, make_image_input
from miles.core.protocols import SamplingParams
from miles.core.token_fields import TEACHER_LOGPROB, TOP_TOKENS
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory, Version
from miles.launch.build.teachers import TopLogprobsEngine
from miles.models.checkpoint import hf
from miles.models.tokenizer import load_tokenizer
from miles.rollout.distill.preflight import TeacherRequirements, check_teacher
from miles.rollout.distill.scored_generate import TeacherScoredGenerate
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.reward.context import HTTPEndpoint

VERSION = Version(number=0)
STRATEGIES = ["sampled", "only-student", "only-teacher", "intersection", "union", "xor"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("teacher"), seed=1)


def held(folder, **how):
    return LocalModel(hf.load(folder, device="cpu", dtype=torch.float32), **how)


def drawn(count=5):
    rng = np.random.default_rng(0)
    rows = [sample(rng, prompt=3 + i, reply=4 + i, trajectory=i) for i in range(count)]
    return [
        replace(s, tokens=rng.integers(3, VOCABULARY, len(s)).astype(np.int32), advantages=0 * s.advantages)
        for s in rows
    ]


async def taught(samples, student, live, top, temperature):
    teacher = TeacherClient("x", HTTPEndpoint(url=live.url, batch=3), temperature=temperature)
    rows = []
    for s in samples:

        async def generate(prompt, engine, sampling, s=s):
            branch = spans_of(s, student, top.k if top else 1)
            return Trajectory(branches=(branch,), status=Status.COMPLETED, reward=Reward(value=0.0))

        made = TeacherScoredGenerate(generate=generate, teachers=[teacher], select_teacher=lambda prompt: 0, top=top)
        trajectory = replace(await made(Prompt(id=0, messages=()), None, SamplingParams()), index=s.trajectory)
        rows += build_samples(0, trajectory, advantage=0.0, trained_author=Author.POLICY)
    return rows


def top_of(strategy):
    return None if strategy == "sampled" else TopKSet(k=4, strategy=strategy, vocab_size=VOCABULARY)


def compare(folder, teacher_folder, expected, strategy):
    """A step of a trainer that holds the teacher, and one of a trainer that asks a server."""
    algo = knobs() if strategy == "sampled" else knobs(opd_log_prob_top_k=4, opd_top_k_strategy=strategy)
    found, metrics = [], []
    for teachers, rows in (([held(teacher_folder, frozen=True)], drawn()), ([], expected)):
        actor = held(folder)
        trainer = worker(actor, algo=algo, teachers=teachers, train={"clip_grad": 0.0})
        found.append({})
        for name, p in actor.parameters().items():
            p.register_post_accumulate_grad_hook(partial(keep, found[-1], name))
        metrics.append(step(trainer, rows).metrics)
    largest = max(float(g.abs().max()) for g in found[0].values())
    assert distance(found[0], found[1]) < 1e-5 * max(1, largest) and largest > 0
    for name in ("loss", "distill_kl", "teacher_logp"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loss_and_gradients_are_those_of_a_teacher_that_is_held(folder, teacher_folder, strategy):
    reported = served(lambda live: taught(drawn(), held(folder), live, top_of(strategy), 1.0), teacher_folder)
    compare(folder, teacher_folder, reported, strategy)


def test_images_are_not_dropped_but_refused():
    async def generate(prompt, engine, sampling):
        image = PlacedImage(start=0, length=1, image=make_image_input({}, 1))
        shown = Span(author=Author.PROMPT, tokens=np.array([5, 6], np.int32), images=(image,))
        said = Span(
            author=Author.POLICY, tokens=np.array([7], np.int32), logprobs=np.zeros(1, np.float32), version=VERSION
        )
        return Trajectory(branches=((shown, said),), status=Status.COMPLETED, reward=Reward(value=0.0))

    teacher = TeacherClient("x", HTTPEndpoint(url="http://127.0.0.1:9"))
    scored = TeacherScoredGenerate(generate=generate, teachers=[teacher], select_teacher=lambda prompt: 0)
    with pytest.raises(EngineError, match="cannot score a trajectory with images"):
        asyncio.run(scored(Prompt(id=0, messages=()), None, SamplingParams()))


@pytest.mark.sglang
def test_stock_sglang_teaches_the_same(folder, teacher_folder, tmp_path):
    with sglang(teacher_folder, tmp_path / "log") as wire:
        asyncio.run(look(wire, folder))
        with pytest.raises(UsageError, match="returns log-probs at temperature 1 whatever is requested"):
            asyncio.run(look(wire, folder, temperature=TEMPERATURE))
        for strategy in STRATEGIES:
            reported = asyncio.run(taught(drawn(), held(folder), wire, top_of(strategy), 1.0))
            compare(folder, teacher_folder, reported, strategy)


def look(live, folder, *, temperature=1.0, **changed):
    tokenizer = load_tokenizer(folder)
    teacher = TeacherClient("x", HTTPEndpoint(url=live.url, retries=0), temperature=temperature)
    top = TopKSet(k=4, strategy="union", vocab_size=VOCABULARY)
    needs = {"tokens": (5, 6, 7), "text": "the lazy dog", "vocab_size": len(tokenizer), "positions": 512, "top": top}
    return check_teacher(teacher, tokenizer, TeacherRequirements(**needs | changed))


def test_our_server_is_a_teacher_and_says_how_far_it_reads(folder):
    async def story(live):
        await look(live, folder)
        with pytest.raises(UsageError, match="reads 512 positions and the policy may write 513"):
            await look(live, folder, positions=513)
        with pytest.raises(UsageError, match=r"cannot be used: .*status 400"):
            await look(live, folder, vocab_size=VOCABULARY + 1)

    served(story, folder)


def test_a_temperature_is_heeded_or_refused_and_never_passed_over(folder, teacher_folder):
    async def story(live):
        try:
            await look(live, folder, temperature=TEMPERATURE)
        except UsageError as error:
            assert "at temperature 1 whatever is requested" in str(error)
            return
        (row, *_) = await taught(drawn(1), held(folder), live, None, TEMPERATURE)
        logp = logps_of(held(teacher_folder))(row.tokens, TEMPERATURE)
        at = np.flatnonzero(row.mask)
        assert np.allclose(row.extras[TEACHER_LOGPROB][at], logp[at - 1, row.tokens[at]], atol=1e-5)

    served(story, teacher_folder)


def test_a_token_the_teacher_does_not_know_ends_the_step_with_a_sentence_and_not_the_server(folder):
    async def story(live):
        teacher = TeacherClient("x", HTTPEndpoint(url=live.url, retries=0))

        async def generate(prompt, engine, sampling):
            asked = Span(author=Author.PROMPT, tokens=np.array([1, VOCABULARY], np.int32))
            branch = (asked, spans_of(drawn(1)[0], held(folder), 1)[1])
            return Trajectory(branches=(branch,), status=Status.COMPLETED)

        made = TeacherScoredGenerate(generate=generate, teachers=[teacher], select_teacher=lambda prompt: 0)
        with pytest.raises(EngineError, match="the teacher x did not score a trajectory"):
            await made(Prompt(id=0, messages=()), None, SamplingParams())
        await look(live, folder)

    served(story, folder)


def test_the_engine_tells_the_tokens_it_found_likeliest(folder):
    async def story(live):
        top_engine = TopLogprobsEngine(engine=live.engine, k=3)
        prompt = np.array([5, 17, 300, 44], np.int32)
        how = SamplingParams(temperature=0.9, max_new_tokens=6, ignore_eos=True, seed=3)
        mine = await top_engine.generate(prompt, how)
        plain = await live.engine.generate(prompt, how)
        (span,), (same,) = mine.spans, plain.spans
        assert span.tokens.tolist() == same.tokens.tolist()
        logp = logps_of(held(folder))([*prompt.tolist(), *span.tokens.tolist()], 0.9)[len(prompt) - 1 : -1]
        assert span.extras[TOP_TOKENS].tolist() == np.argsort(-logp, axis=-1)[:, :3].tolist()

    served(story, folder)


def test_many_trajectories_are_scored_side_by_side(folder):
    async def story():
        async with serving(folder) as live:
            student = held(folder)
            return await asyncio.gather(*(taught(drawn(3), student, live, None, 1.0) for _ in range(4)))

    one, *others = asyncio.run(story())
    for rows in others:
        for a, b in zip(one, rows, strict=True):
            assert np.allclose(a.extras[TEACHER_LOGPROB][a.mask], b.extras[TEACHER_LOGPROB][b.mask], atol=1e-6)
