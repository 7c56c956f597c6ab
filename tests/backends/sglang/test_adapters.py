"""Adapters alone go to servers: what these come to is what the trainer has, to the bit, or they are sent that."""

import asyncio

import pytest
import torch
from tests.backends.sglang.near import DRAWN, PROMPT, stand, url_of, weights_of

from miles.backends.sglang.adapters import OfAdapters, base_digests
from miles.backends.sglang.lines import Staged
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.models.choice import chosen_spec
from miles.models.lora import Adapters
from miles.models.lora_targets import Lora, chosen
from miles.sync.adapters import Parcel, packed, unpacked


class Trainer:
    """A base, adapters, and the weights that are both together."""

    def __init__(self, folder, wanted=None) -> None:
        spec = chosen_spec(folder, "auto")
        self.base = weights_of(folder)
        self.adapters = Adapters(
            Lora(rank=2, alpha=4.0, targets=chosen(spec, wanted, None)), device=torch.device("cpu"), seed=0
        )
        self.said: list[str] = []
        self.carrier = OfAdapters(
            lambda: self.adapters,
            lambda: base_digests(folder, spec, self.adapters.lora, torch.float32),
            seconds=60.0,
            tell=self.said.append,
        )

    def step(self, seed):
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.adapters.parameters.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))

    def weights(self):
        found = {name: tensor.clone() for name, tensor in self.base.items()}
        for ours in self.adapters.places:
            self.adapters.merge(ours, found[ours], self.base[ours])
        return found


def urls(pair):
    return [url_of(hosted) for hosted in pair]


def holds(hosted, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in hosted.engine.weights().items())


def whole(monkeypatch):
    """How often a server was sent tensors."""
    sent, bucket = [], Staged.bucket

    async def counted(line, given):
        sent.append(line.seat.name)
        await bucket(line, given)

    monkeypatch.setattr(Staged, "bucket", counted)
    return sent


@pytest.mark.parametrize("wanted", [None, "q_proj,down_proj"], ids=["all projections", "some"])
def test_only_adapters_travel_and_servers_have_the_trainers_weights(pair, folders, monkeypatch, wanted):
    trainer = Trainer(folders.a, wanted)

    async def run():
        async with stand(folders.a, urls(pair), carrier=trainer.carrier, bucket_bytes=9_000) as made:
            sent = whole(monkeypatch)
            for number in (1, 2, 3):
                trainer.step(number)
                made.current = trainer.weights()
                told = await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
                numbers = sum(p.nbytes for p in trainer.adapters.parameters.values())
                moved = sum(made.current[ours].nbytes for ours in trainer.adapters.places)
                assert numbers <= told["publish/bytes"] < numbers + 400 * len(trainer.base) and numbers < moved / 3
            assert not sent and not trainer.said
            return await made.fleet.generate(PROMPT, DRAWN)

    assert asyncio.run(run()).spans[0].version == Version(number=3)


def test_the_base_is_read_from_the_checkpoint_where_a_server_begins_with_weights_that_were_trained(
    pair, folders, monkeypatch
):
    trainer = Trainer(folders.a)
    for hosted in pair:  # what tests before have left
        hosted.server.control._merging._digests.clear()

    async def run():
        async with stand(folders.a, urls(pair), carrier=trainer.carrier) as made:
            trainer.step(5)
            made.current = trainer.weights()
            made.sync._kept = None  # as of a run that is taken up again, which begins with this version
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
        async with stand(folders.a, urls(pair), carrier=trainer.carrier) as made:
            for number in (1, 2, 3):
                trainer.step(number)
                made.current = trainer.weights()
                await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
            first, second = sorted(trainer.said)
            assert "engine 0 takes no adapters" in first and "engine 1 takes no adapters" in second
            assert "that adapters are to be added to" in first

    asyncio.run(run())


def test_a_merged_matrix_that_is_off_by_a_bit_is_found_and_the_trainers_own_is_sent(pair, folders, monkeypatch):
    trainer = Trainer(folders.a)

    async def run():
        async with stand(folders.a, urls(pair), carrier=trainer.carrier) as made:
            sent = whole(monkeypatch)
            for number in (1, 2, 3, 4):
                trainer.step(number)
                made.current = trainer.weights()
                name = next(iter(trainer.adapters.places))
                if number < 4:
                    made.current[name].view(torch.int32)[0, 0] ^= 1
                await made.sync.publish(Version(number=number))
                assert all(holds(hosted, made.current) for hosted in pair)
                assert sent, "a digest that differs went unseen"
            assert trainer.said == [
                "adapters were not taken as they were sent; from now on matrices are sent with them in."
            ]

    asyncio.run(run())


def test_what_is_no_parcel_of_adapters_is_refused():
    good = Parcel(scale=2.0, base={"w": 7}, factors={"w": (torch.ones(2, 3), torch.ones(4, 2))})
    back = unpacked(packed(good))
    assert back.scale == 2.0 and back.base == {"w": 7} and torch.equal(back.factors["w"][1], torch.ones(4, 2))
    uneven = Parcel(scale=2.0, base={"w": 7}, factors={"w": (torch.ones(2, 3), torch.ones(4, 3))})
    nameless = Parcel(scale=2.0, base={}, factors=good.factors)
    for body in (b"", b"{}", b"[]\n", packed(good)[:-3], packed(uneven), packed(nameless)):
        with pytest.raises(SyncError):
            unpacked(body)
