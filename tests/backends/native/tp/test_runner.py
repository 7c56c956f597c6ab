"""Tensor-parallel engine: several processes answer as one does; when one dies, every request fails with the reason.

Few groups of processes for many checks: starting one costs more than all that is asked of it.
"""

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import ATTENTION, EXPERTS, Tiny
from tests.backends.native.test_speculative import KnownDrafter

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.tp import runner
from miles.backends.native.tp.runner import launch_tp_runner
from miles.backends.native.tp.worker import RunnerSpec, scatter_shards
from miles.cluster import spmd
from miles.cluster.executor import Executor, InlineExecutor, ThreadExecutor
from miles.core.errors import EngineError, SyncError, UsageError
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import FAST
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.draft.base import Draft
from miles.models.draft.checkpoint import build_meta_draft
from miles.models.draft.spec import build_eagle_spec, build_mtp_spec
from miles.models.families.registry import find_family
from miles.models.spec import DecoderSpec, LayerSpec, MlaSpec, MlpSpec, RopeSpec

CPU = torch.device("cpu")
MLA = MlaSpec(
    num_heads=4, query_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5, rope=RopeSpec(theta=1e4), scale=0.3
)
# Vocabulary and inner channels do not divide by four, and there are fewer key-value heads than that.
TIED = replace(
    Tiny.spec,
    layers=(
        LayerSpec(mixer=ATTENTION, ffn=MlpSpec(size=46)),
        LayerSpec(mixer=MLA, ffn=replace(EXPERTS, shared=MlpSpec(size=10), shared_gate=True)),
    ),
)
UNTIED = replace(
    Tiny.moe_spec,
    tie_embeddings=False,
    layers=(
        LayerSpec(mixer=replace(ATTENTION, qk_norm="all", sinks=True, gated=True, output_bias=True), ffn=EXPERTS),
        LayerSpec(mixer=replace(ATTENTION, window=9), ffn=MlpSpec(size=48, bias=True)),
    ),
)


def model(spec: DecoderSpec, seed: int = 0) -> Decoder:
    """Random weights, no bias among them zero."""
    decoder = Tiny().decoder(seed, spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return decoder


@contextmanager
def shared(
    spec: DecoderSpec,
    world: int,
    *,
    run: Executor | None = None,
    depth: int = 0,
    device: torch.device = CPU,
    draft: Draft | None = None,
    **knobs,
) -> Iterator[NativeEngine]:
    engine = NativeEngine(
        spec,
        device=device,
        dtype=torch.float32,
        config=NativeConfig(
            **{name if name.startswith("speculative_") else f"engine_{name}": value for name, value in knobs.items()}
        ),
        run=run or InlineExecutor(),
        decode=None,
        devices=[device] * world,
        draft=draft,
        _depth=depth,
    )
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


class Pair:
    """An engine on several ranks, and one alone with the same weights and knobs."""

    def __init__(self, engine: NativeEngine, spec: DecoderSpec, depth: int, **knobs) -> None:
        self.tiny, self.engine, self.spec = Tiny(depth), engine, spec
        self.alone = self.tiny.engine(model(spec), **knobs)

    def publish(self, seed: int, number: int) -> None:
        decoder = model(self.spec, seed)
        self.tiny.publish(self.engine, decoder, number)
        self.tiny.publish(self.alone, decoder, number)

    def compare(self, requests) -> None:
        many, one = (self.tiny.generate_all(engine, requests) for engine in (self.engine, self.alone))
        for ours, theirs in zip(many, one, strict=True):
            self.same(ours, theirs)

    def same(self, ours, theirs) -> None:
        assert self.tiny.tokens(ours) == self.tiny.tokens(theirs)
        np.testing.assert_allclose(self.tiny.logprobs(ours), self.tiny.logprobs(theirs), atol=1e-5)
        assert (ours.status, ours.cached_tokens) == (theirs.status, theirs.cached_tokens)
        for mine, other in zip(ours.spans, theirs.spans, strict=True):
            assert mine.version == other.version
            np.testing.assert_array_equal(mine.extras["routed_experts"], other.extras["routed_experts"])


@pytest.fixture(scope="module", autouse=True)
def swift() -> Iterator[None]:
    """Ranks are forked from a process that has what they import, and what the commands of other tests import."""
    multiprocessing.set_forkserver_preload(["miles.backends.native.tp.worker", "tests.launch.small_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "START_METHOD", "forkserver")
        yield


@pytest.fixture(scope="module", params=[(TIED, 4, 0), (UNTIED, 2, 1)], ids=["four ranks, tied", "two ranks, untied"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    spec, world, depth = request.param
    knobs = {"kv_tokens": 160, "max_running": 8, "page_size": 8}
    with shared(spec, world, depth=depth, **knobs) as engine:
        yield Pair(engine, spec, depth, **knobs)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Every check of a pair begins with the first weights and an empty cache."""
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair").publish(0, 0)


def test_tokens_and_logprobs_are_those_of_an_engine_alone(pair: Pair):
    pair.compare(pair.tiny.mixed(6, new=10))


@pytest.mark.parametrize("spec", [UNTIED, Tiny.hybrid_spec], ids=["attention", "recurrent"])
def test_drafts_are_verified_on_all_ranks(spec: DecoderSpec):
    knobs = {"kv_tokens": 800, "max_running": 30, "page_size": 8}
    drafts = {"speculative_algorithm": "ngram", "speculative_num_branches": 3, "speculative_adaptive": False}
    with shared(spec, 2, **drafts, **knobs) as engine:
        plain = Pair(engine, spec, 0, **knobs)
        plain.publish(0, 0)
        requests = plain.tiny.mixed(6, new=20)
        for _ in range(2):  # the second time with drafts that are known to be right, many of them in branches
            many, one = (plain.tiny.generate_all(each, requests) for each in (engine, plain.alone))
            for ours, theirs in zip(many, one, strict=True):
                assert plain.tiny.tokens(ours) == plain.tiny.tokens(theirs)
                np.testing.assert_allclose(plain.tiny.logprobs(ours), plain.tiny.logprobs(theirs), atol=1e-5)
            engine._speculation._drafter = KnownDrafter(requests, one)
        assert engine.stats()["accepted_draft_tokens"] > 5
        assert engine.stats()["accepted_draft_branches"] > 2


@pytest.mark.parametrize(("kind", "num_branches"), [("eagle3", 3), ("mtp", 1), ("reduced vocabulary", 1)])
def test_a_draft_head_drafts_on_all_ranks_as_on_one(kind: str, num_branches: int):
    """Tokens are those without drafts, greedy and sampled; as many drafts are accepted as on one rank."""
    spec = replace(UNTIED, vocab_size=6, eos_token_ids=())
    head, empty = make_head(kind, spec), make_head(kind, spec)
    knobs = {"kv_tokens": 800, "max_running": 30, "page_size": 8}
    drafts = {
        "speculative_algorithm": "eagle3",
        "speculative_num_branches": num_branches,
        "speculative_num_draft_tokens": 3,
        "speculative_adaptive": False,
    }
    plain = Tiny()
    decoder = model(spec)
    requests = [
        (prompt % 6, replace(how, max_new_tokens=20))
        for prompt, (_, how) in zip(plain.prompts(7), plain.mixed(7), strict=True)
    ]
    requests += [(requests[0][0], SamplingParams(max_new_tokens=20, seed=seed)) for seed in range(2)]
    expected = plain.generate_all(plain.engine(decoder, **knobs), requests)
    alone = plain.engine(decoder, draft=make_head(kind, spec), head=head, **knobs, **drafts)
    plain.generate_all(alone, requests)
    with shared(spec, 2, draft=empty, **drafts, **knobs) as engine:
        plain.publish(engine, decoder, head=head)

        async def nap() -> None:
            await engine.sleep()
            await engine.wake()

        for _ in range(2):
            before = engine.stats()["accepted_draft_tokens"]
            for ours, theirs in zip(plain.generate_all(engine, requests), expected, strict=True):
                assert plain.tokens(ours) == plain.tokens(theirs)
                np.testing.assert_allclose(plain.logprobs(ours), plain.logprobs(theirs), atol=1e-5)
            accepted = engine.stats()["accepted_draft_tokens"] - before
            assert accepted == alone.stats()["accepted_draft_tokens"] > 20
            asyncio.run(nap())
        if num_branches > 1:
            assert engine.stats()["accepted_draft_branches"] > 0
        held = engine.weights()
        assert all(torch.equal(held[f"draft.{name}"], tensor) for name, tensor in head.named_parameters())


def make_head(kind: str, spec: DecoderSpec) -> Draft:
    """A random head, of MTP layers, EAGLE-3, or EAGLE-3 with four of the policy's six tokens."""
    eagle = build_eagle_spec(spec)
    layout = find_family("qwen3_next").mtp
    assert layout is not None
    draft_spec = {
        "eagle3": eagle,
        "reduced vocabulary": replace(eagle, draft_vocab_size=4),
        "mtp": build_mtp_spec(spec, layout),
    }[kind]
    head = build_meta_draft(draft_spec, dtype=torch.float32)
    offsets = {} if head.token_offsets_v is None else {"token_offsets_v": torch.tensor([0, 1, 1, 2])}
    head.load_state_dict({**hf.sample_params(head, seed=5, device="cpu"), **offsets}, assign=True)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return head


def test_new_weights_reach_every_rank_also_in_the_middle_of_an_answer(pair: Pair):
    prompt = pair.tiny.prompts(1)[0]

    async def interrupted(engine: NativeEngine, seed: int):
        answer = engine.submit(
            GenerateRequest(tokens=prompt, sampling=SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True))
        )
        before = engine.stats()["steps"]
        while engine.stats()["steps"] < before + 4:
            await asyncio.sleep(0)
        await engine.pause()
        pair.tiny.publish(engine, model(pair.spec, seed), 1)
        await engine.resume()
        return await answer.completion()

    ours, theirs = (asyncio.run(interrupted(engine, 5)) for engine in (pair.engine, pair.alone))
    pair.same(ours, theirs)
    assert [span.version.number for span in ours.spans if span.version] == [0, 1]
    pair.publish(6, 2)
    pair.compare(pair.tiny.mixed(3, new=8))


def test_a_prompt_is_computed_once_for_all_who_share_it(pair: Pair):
    prompts = pair.tiny.prompts(2, seed=4, low=10, high=20)
    requests = [(prompt, SamplingParams(max_new_tokens=8, seed=i)) for prompt in prompts for i in range(4)]
    before = pair.engine.stats()["prefilled_tokens"]
    pair.compare(requests)
    assert pair.engine.stats()["prefilled_tokens"] - before == sum(map(len, prompts))
    pair.compare(requests[:3])  # what they left behind is found


def test_requests_that_had_to_give_way_answer_the_same(pair: Pair):
    before = pair.engine.stats()["preemptions"]
    pair.compare([(p, replace(how, ignore_eos=True)) for p, how in pair.tiny.mixed(6, new=14)])
    assert pair.engine.stats()["preemptions"] > before


def test_what_is_scored_looked_up_and_edited_is_the_same(pair: Pair):
    prompt = pair.tiny.prompts(1, seed=2, low=20)[0]
    looks = {"tokens": prompt, "top_logprobs_num": 3, "token_ids_logprob": (5, 60)}
    edits = {"frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "min_new_tokens": 2}
    scored = GenerateRequest(**looks, sampling=SamplingParams(max_new_tokens=0), logprob_start_len=0)
    drawn = GenerateRequest(**looks, **edits, sampling=SamplingParams(max_new_tokens=6, seed=1))

    async def answers(engine: NativeEngine):
        opened = [engine.submit(ask) for ask in (scored, drawn)]
        return [(answer, await answer.completion()) for answer in opened]

    ours, theirs = (asyncio.run(answers(engine)) for engine in (pair.engine, pair.alone))
    pair.same(ours[1][1], theirs[1][1])
    mine, other = ours[0][0].prompt_logprobs, theirs[0][0].prompt_logprobs
    assert mine is not None
    assert other is not None
    np.testing.assert_allclose(mine.logprobs[1:], other.logprobs[1:], atol=1e-5)
    for one, two in ((mine, other), (ours[1][0], theirs[1][0])):
        for row, same in zip(
            [*one.top_logprobs, *one.token_ids_logprobs], [*two.top_logprobs, *two.token_ids_logprobs], strict=True
        ):
            assert [token for token, _ in row] == [token for token, _ in same]
            np.testing.assert_allclose([p for _, p in row], [p for _, p in same], atol=1e-5)


def test_ranks_sleep_and_wake_together(pair: Pair):
    async def nap() -> None:
        await pair.engine.sleep()
        await pair.engine.wake()

    asyncio.run(nap())
    pair.compare(pair.tiny.mixed(2, new=6))


def test_the_whole_weights_can_be_read_again(pair: Pair):
    held = pair.engine.weights()
    expected = dict(model(pair.spec).named_parameters())
    assert list(held) == list(expected)
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


def test_a_slice_that_did_not_arrive_as_it_left_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    def damaged(comm, shards, like):
        shards = [shards[0], *(shard + 1 for shard in shards[1:])] if like.dim() == 3 else shards
        return scatter_shards(comm, shards, like)

    monkeypatch.setattr(runner, "scatter_shards", damaged)
    with pytest.raises(SyncError, match=r"engine 0: rank 1 received tensor layers\.\d\.moe\.\w+ with a wrong digest"):
        pair.tiny.publish(pair.engine, model(pair.spec, 9), 9)
    pair.engine.rollback()
    monkeypatch.undo()
    assert pair.engine.version is not None and pair.engine.version.number == 0
    pair.compare(pair.tiny.mixed(2, new=6))


def test_a_killed_rank_fails_everyone_in_one_sentence_and_leaves_no_process():
    tiny, spec, run, others = Tiny(), Tiny.hybrid_spec, ThreadExecutor("engine"), multiprocessing.active_children()
    with shared(spec, 2, run=run, kv_tokens=2048) as engine:
        tiny.publish(engine, model(spec))
        requests = tiny.mixed(4, new=10)
        for ours, theirs in zip(
            tiny.generate_all(engine, requests), tiny.generate_all(tiny.engine(model(spec)), requests), strict=True
        ):
            tiny.same(ours, theirs)
        follower = next(one for one in multiprocessing.active_children() if one not in others)

        async def struck() -> list:
            endless = SamplingParams(max_new_tokens=200, ignore_eos=True)
            answers = [engine.submit(GenerateRequest(tokens=prompt, sampling=endless)) for prompt in tiny.prompts(3)]
            await answers[0].__anext__()
            follower.kill()
            return await asyncio.gather(*(answer.completion() for answer in answers), return_exceptions=True)

        started = time.monotonic()
        errors = asyncio.run(struck())
        assert time.monotonic() - started < runner.RANK_TIMEOUT / 10
        sentences = [str(error) for error in errors]
        assert len(sentences) == 3 and len(set(sentences)) == 1
        assert sentences[0].startswith("engine 0 was stopped, because rank 1 of 2 ended with SIGKILL")
        assert sentences[0].endswith("; start it again")
        assert all(isinstance(error, EngineError) for error in errors)
        assert follower not in multiprocessing.active_children()
        with pytest.raises(EngineError, match="rank 1 of 2 ended with SIGKILL"):
            asyncio.run(engine.generate(tiny.prompts(1)[0], SamplingParams(max_new_tokens=1)))
        with pytest.raises(EngineError, match="rank 1 of 2"):
            asyncio.run(engine.health())
    run.close()


def test_a_rank_that_cannot_start_is_told_in_one_sentence():
    runner_spec = RunnerSpec(
        spec=Tiny.spec, page_size=8, num_slots=4, return_routed_experts=True, dtype=torch.float32, numerics=FAST
    )
    nowhere = torch.device("cuda", 7)
    with pytest.raises(EngineError, match=r"^engine 3 was stopped, because rank 1 of 2 failed: .+; start it again$"):
        launch_tp_runner("engine 3", runner_spec, [CPU, nowhere], compute_num_pages=lambda spec, platform: 8)


def test_a_model_that_cannot_be_cut_starts_no_process():
    before = multiprocessing.active_children()
    with (
        pytest.raises(UsageError, match="sharded over 3 tensor-parallel ranks: layer 0 has 4 attention heads"),
        shared(Tiny.spec, 3),
    ):
        pass
    assert multiprocessing.active_children() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("spec", [TIED, UNTIED], ids=["tied", "untied"])
def test_ranks_that_share_an_accelerator_answer_as_one_alone(spec):
    device, tiny = torch.device("cuda", 0), Tiny(1)
    with shared(spec, 2, device=device, depth=1, kv_tokens=2048) as engine:
        decoder = model(spec).to(device)
        tiny.publish(engine, decoder)
        requests = [(prompt, SamplingParams(max_new_tokens=12, temperature=0.0)) for prompt in tiny.prompts(4)]
        many, one = (tiny.generate_all(each, requests) for each in (engine, tiny.engine(decoder)))
        for ours, theirs in zip(many, one, strict=True):
            assert tiny.tokens(ours) == tiny.tokens(theirs)
            np.testing.assert_allclose(tiny.logprobs(ours), tiny.logprobs(theirs), atol=1e-3)


LONE = """
import multiprocessing, sys, torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.tp.test_runner import shared

if __name__ == "__main__":
    with shared(Tiny.spec, 2, kv_tokens=512):
        print(multiprocessing.active_children()[0].pid, flush=True)
        sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_an_engine_that_is_killed(tmp_path: Path):
    script = tmp_path / "single.py"
    script.write_text(LONE)
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    leader = subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert leader.stdout is not None
    follower = os.pidfd_open(int(leader.stdout.readline()))
    leader.send_signal(signal.SIGKILL)
    leader.communicate()
    watch = select.poll()
    watch.register(follower, select.POLLIN)
    assert watch.poll(30_000), "a rank goes on without its engine"
    os.close(follower)
