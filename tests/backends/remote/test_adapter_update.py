"""Stock SGLang takes a run's adapters by its own endpoints: each version is one adapter, which requests name.

The tests run against a fake that counts requests as SGLang does, and, with the marker sglang, against the server itself
on a CPU, where log-probs are compared with the PEFT library's.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import set_peft_model_state_dict
from tests.backends.remote.fake_sglang import FakeSglang, serving
from tests.backends.remote.harness import LONG, PROMPT, SHORT, PoolHarness, client_of
from tests.server_api.live_servers import sglang
from transformers import AutoModelForCausalLM

from miles.backends.remote.sglang_lora import build_adapter_format, build_lora_flags, find_target_problem
from miles.backends.remote.transports.buckets import iter_hf_named
from miles.backends.remote.weight_update import RemoteWeightUpdate
from miles.cluster.executor import InlineExecutor
from miles.core.errors import EngineError, SyncError
from miles.core.types import Status, Version
from miles.models.checkpoint.param_slices import param_shape
from miles.models.checkpoint.peft import peft_tensor_name
from miles.models.lora.layout import adapter_spec, build_factor_map
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.resolve import resolve_spec

RANK = 4
MAX_RUNNING = 2
_POLICIES = count()


def make_lora(folder, words="all-linear", *, rank=RANK, **form) -> LoraSpec:
    return LoraSpec(rank=rank, alpha=8.0, targets=select_targets(resolve_spec(folder, "auto"), words, None), **form)


class AdapterPool(PoolHarness):
    """A pool whose servers are sent the factors of an adapter alone; ``draw`` makes new ones.

    Its policy has a name of its own, since the server of the module may have adapters of other tests.
    """

    def __init__(self, folder, urls, lora: LoraSpec) -> None:
        super().__init__(folder, urls)
        self.spec = replace(resolve_spec(folder, "auto"), adapters=adapter_spec(lora))
        self.lora = lora
        self.policy = f"policy{next(_POLICIES)}"
        self.draw(0)
        self.sync = RemoteWeightUpdate(
            self.pool,
            weights=lambda: self.current,
            spec=self.spec,
            transport=self.sync._transport,
            executor=InlineExecutor(),
            bucket_bytes=3_000,
            seconds=60.0,
            log=self.said.append,
        )

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.current = {
            name: 0.3 * torch.randn(param_shape(slices), generator=generator)
            for name, slices in build_factor_map(self.spec).items()
        }

    async def publish(self, number: int) -> dict[str, float]:
        self.draw(number)
        return dict(await self.sync.publish(Version(self.policy, number)))

    async def listed(self) -> set[int]:
        """The versions of this policy that the first server has."""
        names = [name.rpartition("-") for name in await self.clients[0].list_adapters()]
        return {int(number.partition(".")[0]) for policy, _, number in names if policy == self.policy}


@asynccontextmanager
async def pool_of(folder, urls, lora: LoraSpec) -> AsyncIterator[AdapterPool]:
    made = AdapterPool(folder, urls, lora)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


@dataclass
class Server:
    """A stock server, or the fake, which is made anew for each test."""

    folder: object
    url: str | None

    @asynccontextmanager
    async def address(self) -> AsyncIterator[str]:
        if self.url is not None:
            yield self.url
            return
        async with serving(FakeSglang(self.folder, max_running=MAX_RUNNING)) as url:
            yield url


@pytest.fixture(scope="module")
def stock(folders, tmp_path_factory) -> Iterator[str]:
    spec, lora = resolve_spec(folders.a, "auto"), make_lora(folders.a)
    flags = build_lora_flags(spec, lora, device="cpu", num_adapters=3)
    words = [word for name, values in flags.items() for word in (f"--{name}", *values)]
    log = tmp_path_factory.mktemp("sglang") / "log"
    with sglang(folders.a, log, *words, "--max-running-requests", str(MAX_RUNNING)) as wire:
        yield wire.url


STOCK = pytest.param("stock", marks=[pytest.mark.sglang, pytest.mark.slow])


@pytest.fixture(params=["fake", STOCK])
def server(request, folders) -> Server:
    return Server(folders.a, None if request.param == "fake" else request.getfixturevalue(request.param))


def versions(completion) -> set[int]:
    return {span.version.number for span in completion.spans}


def test_each_publication_is_a_new_adapter_and_the_old_one_is_unloaded(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            for number in (0, 1, 2):
                metrics = await made.publish(number)
                assert metrics["publish/bytes"] == sum(tensor.nbytes for tensor in made.current.values())
                assert versions(await made.pool.generate(PROMPT, SHORT)) == {number}
                await made.clients[0].adapters.wait_unloaded()
                assert await made.listed() == {number}
                assert (await made.clients[0].fetch_info()).weight_version == f"{made.policy}-{number}"

    asyncio.run(run())


def test_a_request_in_flight_ends_with_the_adapter_that_it_began_with(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(0)
            begun = asyncio.Event()
            request = asyncio.create_task(made.pool.generate_stream(PROMPT, LONG, lambda tokens: begun.set()))
            await begun.wait()
            await made.publish(1)
            assert not request.done(), "the publication waited for the request, or it was too short"
            assert await made.listed() == {0, 1}
            assert versions(await made.pool.generate(PROMPT, SHORT)) == {1}
            old = await request
            assert versions(old) == {0} and sum(len(span.tokens) for span in old.spans) == LONG.max_new_tokens
            await made.clients[0].adapters.wait_unloaded()
            assert await made.listed() == {1}

    asyncio.run(run())


def test_requests_that_are_aborted_while_they_wait_do_not_keep_an_adapter(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(0)
            begun = asyncio.Event()
            requests = [
                asyncio.create_task(made.pool.generate_stream(PROMPT + i, LONG, lambda tokens: begun.set()))
                for i in range(3 * MAX_RUNNING)
            ]
            await begun.wait()
            await made.pool.abort()
            ended = await asyncio.gather(*requests)
            assert {completion.status for completion in ended} == {Status.ABORTED}
            assert not made.clients[0].adapters.stuck
            await made.publish(1)
            await made.clients[0].adapters.wait_unloaded()
            assert await made.listed() == {1}

    asyncio.run(run())


def test_an_interrupted_request_leaves_its_adapter_and_stops_no_publication(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(0)
            begun = asyncio.Event()
            requests = [
                asyncio.create_task(made.pool.generate_stream(PROMPT + i, LONG, lambda tokens: begun.set()))
                for i in range(2 * MAX_RUNNING)
            ]
            await begun.wait()
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            for number in (1, 2):
                await made.publish(number)
                assert versions(await made.pool.generate(PROMPT, SHORT)) == {number}
            await made.clients[0].adapters.wait_unloaded()
            assert await made.listed() == {0, 2}
            assert any(f"keeps adapter {made.policy}-0" in said for said in made.said)

    asyncio.run(run())


def test_a_server_that_joins_is_sent_the_adapter_before_its_first_request(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(5)
            before = await made.pool.generate(PROMPT, SHORT)
            slot, lost = made.pool.slots[0], made.clients[0]
            made.pool.mark_failed(slot, "the connection was lost")
            made.sync.leave(slot)
            made.clients[0] = client_of(url, slot.name)
            await made.sync.join(slot, made.clients[0])
            after = await made.pool.generate(PROMPT, SHORT)
            assert (
                versions(after) == versions(before) == {5} and made.clients[0].adapters.current == f"{made.policy}-5.1"
            )
            await lost.close()

    asyncio.run(run())


def test_a_pool_that_closes_leaves_no_adapter_on_a_server_that_goes_on(server, folders):
    async def run():
        async with server.address() as url:
            async with pool_of(folders.a, [url], make_lora(folders.a)) as made:
                await made.publish(9)
                assert await made.listed() == {9}
            made.clients = [client_of(url, "again")]
            assert await made.listed() == set()
            await made.clients[0].close()

    asyncio.run(run())


def test_sleep_and_wake_keep_the_adapter(server, folders):
    async def run():
        async with server.address() as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(7)
            greedy = replace(SHORT, temperature=0.0)
            before = await made.pool.generate(PROMPT, greedy)
            await made.pool.sleep()
            await made.pool.wake()
            after = await made.pool.generate(PROMPT, greedy)
            assert np.array_equal(before.spans[0].tokens, after.spans[0].tokens)
            np.testing.assert_allclose(before.spans[0].logprobs, after.spans[0].logprobs, atol=1e-5)

    asyncio.run(run())


def test_an_adapter_that_the_server_has_no_room_for_is_rejected_in_a_sentence(server, folders):
    async def run():
        lora = make_lora(folders.a, rank=2 * RANK)
        async with server.address() as url, pool_of(folders.a, [url], lora) as made:
            had = await made.listed()
            with pytest.raises(SyncError, match=r"has no room for adapters of rank 8; start it with --enable-lora"):
                await made.publish(0)
            assert await made.listed() == had

    asyncio.run(run())


# -- several servers, of which one rejects ------------------------------------------------------------


def test_if_one_server_rejects_an_adapter_all_stay_on_the_version_before(folders):
    async def run():
        fakes = [FakeSglang(folders.a), FakeSglang(folders.a)]
        async with (
            serving(fakes[0]) as first,
            serving(fakes[1]) as second,
            pool_of(folders.a, [first, second], make_lora(folders.a)) as made,
        ):
            await made.publish(0)
            fakes[1].reject_load = True
            with pytest.raises(SyncError, match="every server has the previous version"):
                await made.publish(1)
            assert [set(fake.adapters) for fake in fakes] == [{f"{made.policy}-0"}] * 2
            assert [fake.label for fake in fakes] == [f"{made.policy}-0"] * 2
            assert versions(await made.pool.generate(PROMPT, SHORT)) == {0}
            fakes[1].reject_load = False
            await made.publish(2)
            await asyncio.gather(*(client.adapters.wait_unloaded() for client in made.clients))
            assert [set(fake.adapters) for fake in fakes] == [{f"{made.policy}-2"}] * 2
            assert fakes[0].adapters == fakes[1].adapters

    asyncio.run(run())


def test_no_server_is_paused_or_flushed_for_an_adapter(folders):
    async def run():
        fake = FakeSglang(folders.a)
        async with serving(fake) as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(0)
            await made.publish(1)
            assert {"/pause_generation", "/flush_cache", "/update_weights_from_tensor"}.isdisjoint(fake.calls)

    asyncio.run(run())


def test_a_server_whose_weights_another_program_labels_is_an_error(folders):
    async def run():
        fake = FakeSglang(folders.a)
        async with serving(fake) as url, pool_of(folders.a, [url], make_lora(folders.a)) as made:
            await made.publish(3)
            fake.label = "theirs"
            with pytest.raises(EngineError, match="no other program may update the weights"):
                await made.pool.generate(PROMPT, SHORT)

    asyncio.run(run())


# -- what SGLang is sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "zeros"),
    [
        ("all-linear", set()),
        ("v_proj", {"q_proj", "k_proj"}),
        ("up_proj", {"gate_proj"}),
        ("o_proj,down_proj", set()),
    ],
)
def test_projections_that_are_fused_there_are_completed_with_zeros(folders, words, zeros):
    lora = make_lora(folders.a, words, use_rslora=True)
    found = build_adapter_format(replace(resolve_spec(folders.a, "auto"), adapters=adapter_spec(lora)))
    assert found is not None
    assert {name.split(".")[-3] for name in found.zeros} == zeros
    assert found.config["lora_alpha"] / found.config["r"] == pytest.approx(8.0 / RANK**0.5)


def test_experts_are_none_of_the_targets_that_it_takes(tmp_path):
    from tests.server_api.tiny import make

    folder = make(tmp_path / "experts", 2, experts=True)
    spec = resolve_spec(folder, "auto")
    assert find_target_problem(spec, select_targets(spec, "attn", None)) is None
    problem = find_target_problem(spec, select_targets(spec, "experts", None))
    assert problem is not None and "experts" in problem


def compute_logprobs(folder, made: AdapterPool, tokens: list[int], start: int) -> np.ndarray:
    """Of the PEFT library, for the tokens from ``start`` on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = sorted({target.module for target in made.lora.targets})
    form = {"use_rslora": made.lora.use_rslora, "target_modules": names}
    model = get_peft_model(model, LoraConfig(r=made.lora.rank, lora_alpha=int(made.lora.alpha), **form))
    factors = {peft_tensor_name(name): tensor for name, tensor in iter_hf_named(made.spec, made.current)}
    result = set_peft_model_state_dict(model, factors)
    assert not result.unexpected_keys
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    return np.array([float(logprobs[i - 1, tokens[i]]) for i in range(start, len(tokens))])


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "form"),
    [("all-linear", {}), ("all-linear", {"use_rslora": True}), ("v_proj,up_proj", {}), ("k_proj,o_proj", {})],
)
def test_log_probs_are_those_of_the_peft_library(stock, folders, words, form):
    async def run():
        lora = make_lora(folders.a, words, **form)
        async with pool_of(folders.a, [stock], lora) as made:
            await made.publish(11)
            [span] = (await made.pool.generate(PROMPT, SHORT)).spans
            tokens = [*PROMPT.tolist(), *span.tokens.tolist()]
            expected = compute_logprobs(folders.a, made, tokens, len(PROMPT))
            np.testing.assert_allclose(span.logprobs, expected, atol=2e-5)
            zero = {name: torch.zeros_like(tensor) for name, tensor in made.current.items()}
            made.current = zero
            assert np.abs(expected - compute_logprobs(folders.a, made, tokens, len(PROMPT))).max() > 0.01

    asyncio.run(run())
