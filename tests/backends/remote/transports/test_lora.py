"""LoRA transport: servers merge adapters to the trainer's exact weights, or are sent the merged matrices."""

import asyncio

import pytest
import torch
from tests.backends.remote.harness import PROMPT, SHORT, running_pool, url_of, weights_of

from miles.backends.remote.transports.lora import LoraTransport, base_digests
from miles.backends.remote.update_protocols import StagedUpdate
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.resolve import resolve_spec
from miles.sync.adapters import AdapterPayload, pack_adapters, unpack_adapters


class Trainer:
    """A base, adapters, and the weights that are both together."""

    def __init__(self, folder, wanted=None) -> None:
        spec = resolve_spec(folder, "auto")
        self.base = weights_of(folder)
        self.adapters = LoraAdapters(
            LoraSpec(rank=2, alpha=4.0, targets=select_targets(spec, wanted, None)), device=torch.device("cpu"), seed=0
        )
        self.said: list[str] = []
        self.transport = LoraTransport(
            lambda: self.adapters,
            lambda: base_digests(folder, spec, self.adapters.lora, torch.float32),
            seconds=60.0,
            log=self.said.append,
        )

    def step(self, seed):
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.adapters.parameters.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))

    def weights(self):
        found = {name: tensor.clone() for name, tensor in self.base.items()}
        for ours in self.adapters.targets_by_param:
            self.adapters.merge(ours, found[ours], self.base[ours])
        return found


def urls(pair):
    return [url_of(hosted) for hosted in pair]


def holds(hosted, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in hosted.engine.weights().items())


def whole(monkeypatch):
    """How often a server was sent tensors."""
    sent, bucket = [], StagedUpdate.send_bucket

    async def counted(line, given):
        sent.append(line.slot.name)
        await bucket(line, given)

    monkeypatch.setattr(StagedUpdate, "send_bucket", counted)
    return sent


@pytest.mark.parametrize("wanted", [None, "q_proj,down_proj"], ids=["all projections", "some"])
def test_only_adapters_travel_and_servers_have_the_trainers_weights(pair, folders, monkeypatch, wanted):
    trainer = Trainer(folders.a, wanted)

    async def run():
        async with running_pool(folders.a, urls(pair), transport=trainer.transport, bucket_bytes=9_000) as made:
            sent = whole(monkeypatch)
            for number in (1, 2, 3):
                trainer.step(number)
                made.current = trainer.weights()
                reported = await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
                numbers = sum(p.nbytes for p in trainer.adapters.parameters.values())
                moved = sum(made.current[ours].nbytes for ours in trainer.adapters.targets_by_param)
                assert numbers <= reported["publish/bytes"] < numbers + 400 * len(trainer.base) and numbers < moved / 3
            assert not sent and not trainer.said
            return await made.pool.generate(PROMPT, SHORT)

    assert asyncio.run(run()).spans[0].version == Version(number=3)


def test_the_base_is_read_from_the_checkpoint_where_a_server_begins_with_weights_that_were_trained(
    pair, folders, monkeypatch
):
    trainer = Trainer(folders.a)
    for hosted in pair:  # what tests before have left
        hosted.server.admin._merger._digests.clear()

    async def run():
        async with running_pool(folders.a, urls(pair), transport=trainer.transport) as made:
            trainer.step(5)
            made.current = trainer.weights()
            made.sync._committed = None  # as of a run that is taken up again, which begins with this version
            await made.sync.publish(Version(number=5))
            sent = whole(monkeypatch)
            trainer.step(6)
            made.current = trainer.weights()
            await made.sync.publish(Version(number=6))
            assert not sent and all(holds(hosted, made.current) for hosted in pair)

    asyncio.run(run())


def test_a_server_of_another_base_is_sent_matrices_and_asked_once(pair, folders, monkeypatch):
    trainer = Trainer(folders.b)

    async def run():
        async with running_pool(folders.a, urls(pair), transport=trainer.transport) as made:
            for number in (1, 2, 3):
                trainer.step(number)
                made.current = trainer.weights()
                await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
            first, second = sorted(trainer.said)
            assert "engine 0 rejects adapters" in first and "engine 1 rejects adapters" in second
            assert "that the adapter belongs to" in first

    asyncio.run(run())


def test_a_merged_matrix_that_is_off_by_a_bit_is_found_and_the_trainers_own_is_sent(pair, folders, monkeypatch):
    trainer = Trainer(folders.a)

    async def run():
        async with running_pool(folders.a, urls(pair), transport=trainer.transport) as made:
            sent = whole(monkeypatch)
            for number in (1, 2, 3, 4):
                trainer.step(number)
                made.current = trainer.weights()
                name = next(iter(trainer.adapters.targets_by_param))
                if number < 4:
                    made.current[name].view(torch.int32)[0, 0] ^= 1
                await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
                assert sent, "a digest that differs went unseen"
            assert trainer.said == [
                "servers merged the adapters incorrectly; from now on the merged matrices are sent."
            ]

    asyncio.run(run())


def test_what_is_no_parcel_of_adapters_is_refused():
    good = AdapterPayload(scale=2.0, base={"w": 7}, factors={"w": (torch.ones(2, 3), torch.ones(4, 2))})
    back = unpack_adapters(pack_adapters(good))
    assert back.scale == 2.0 and back.base == {"w": 7} and torch.equal(back.factors["w"][1], torch.ones(4, 2))
    uneven = AdapterPayload(scale=2.0, base={"w": 7}, factors={"w": (torch.ones(2, 3), torch.ones(4, 3))})
    nameless = AdapterPayload(scale=2.0, base={}, factors=good.factors)
    for body in (b"", b"{}", b"[]\n", pack_adapters(good)[:-3], pack_adapters(uneven), pack_adapters(nameless)):
        with pytest.raises(SyncError):
            unpack_adapters(body)
