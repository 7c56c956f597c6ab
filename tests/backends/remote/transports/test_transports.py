"""Weight transports by shared memory, differences and partial updates: verified on every server, or unchanged."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from tests.backends.remote.harness import PROMPT, SHORT, client_of, running_pool, url_of, weights_of

from miles.backends.remote.pool.engine_pool import EngineSlot, SlotState
from miles.backends.remote.transports import ipc
from miles.backends.remote.transports.buckets import iter_hf_named
from miles.backends.remote.transports.delta import DeltaTransport
from miles.backends.remote.transports.ipc import IpcTransport
from miles.backends.remote.transports.senders import HttpTransport
from miles.backends.remote.update_protocols import StagedUpdate
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.models.resolve import resolve_spec
from miles.sync.shared_memory import SharedBuffer, describe_location, explain_unreachable, open_handle


def labels(pair):
    return [hosted.server.handler.labels.get(hosted.engine.version) for hosted in pair]


def holds(hosted, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in hosted.engine.weights().items())


def left_in_memory():
    return [name for name in os.listdir("/dev/shm") if name.startswith("miles-")]


def urls(pair):
    return [url_of(hosted) for hosted in pair]


def test_servers_copy_weights_out_of_shared_memory_and_none_of_it_stays(pair, folders):
    before = left_in_memory()

    async def run():
        async with running_pool(folders.a, urls(pair), transport=IpcTransport(), bucket_bytes=9_000) as made:
            made.current = weights_of(folders.b)
            seconds = await made.sync.publish(Version(number=4))
            assert seconds.keys() == {"publish/describe", "publish/transfer", "publish/keep", "publish/bytes"}
            assert "verifies the digest of each of 25 tensors" in made.said[0]
            return await made.pool.generate(PROMPT, SHORT)

    assert asyncio.run(run()).spans[0].version == Version(number=4)
    assert labels(pair) == ["actor-4"] * 2 and left_in_memory() == before
    assert all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_a_bit_that_flips_in_shared_memory_is_found_and_nobody_flips(pair, folders, monkeypatch):
    gathered, count = ipc.gather_into_window, []

    def spoiled(group, memory):
        found = gathered(group, memory)
        count.append(group)
        if len(count) == 3:
            memory[2] ^= 1
        return found

    async def run():
        async with running_pool(folders.a, urls(pair), transport=IpcTransport(), bucket_bytes=9_000) as made:
            made.current = weights_of(folders.b)
            with monkeypatch.context() as patch:
                patch.setattr(ipc, "gather_into_window", spoiled)
                with pytest.raises(SyncError, match=r"engine \d .* has digest \d+, and the sender's is \d+"):
                    await made.sync.publish(Version(number=1))
            assert labels(pair) == ["actor-0"] * 2 and made.sync.committed_version == Version()
            assert all(holds(hosted, weights_of(folders.a)) for hosted in pair)
            await made.sync.publish(Version(number=2))

    asyncio.run(run())
    assert labels(pair) == ["actor-2"] * 2 and all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_who_joins_late_gets_what_was_copied_though_the_trainer_has_gone_on(pair, folders):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])], transport=IpcTransport()) as made:
            made.current = {name: tensor.clone() for name, tensor in weights_of(folders.b).items()}
            await made.sync.publish(Version(number=3))
            for tensor in made.current.values():
                tensor.zero_()
            late, client = EngineSlot("late"), client_of(url_of(pair[1]), "late")
            made.clients.append(client)
            await made.sync.join(late, client)
            assert (late.state, late.version) == (SlotState.SERVING, Version(number=3))

    asyncio.run(run())
    assert labels(pair) == ["actor-3"] * 2 and holds(pair[1], weights_of(folders.b))


def test_a_server_on_another_machine_or_device_is_refused_in_a_sentence(pair, folders, monkeypatch):
    async def elsewhere(line):
        return {"machine": "another", "device": "cpu"}

    monkeypatch.setattr(StagedUpdate, "fetch_location", elsewhere)

    async def run(transport):
        async with running_pool(folders.a, urls(pair), transport=transport) as made:
            await made.sync.publish(Version(number=1))

    before = labels(pair)
    with pytest.raises(
        SyncError, match=r"ipc needs miles serve on the trainer.s device, but engine 0 is on another machine"
    ):
        asyncio.run(run(IpcTransport()))
    assert labels(pair) == before
    said = []
    asyncio.run(run(IpcTransport(HttpTransport(), said.append)))
    assert said == ["Weights are sent in HTTP requests instead of shared memory: engine 0 is on another machine."]
    assert labels(pair) == ["actor-1"] * 2


def test_a_window_is_opened_only_by_who_is_near_and_only_by_its_name():
    here = describe_location(torch.device("cpu"))
    assert explain_unreachable(here, here) is None
    assert "device GPU-1" in (explain_unreachable({**here, "device": "GPU-0"}, {**here, "device": "GPU-1"}) or "")
    window = SharedBuffer(64, torch.device("cpu"))
    try:
        window.memory.fill_(7)
        assert open_handle(window.export_handle(), torch.device("cpu")).tolist() == [7] * 64
        for wrong in (
            {"machine": "m"},
            {"device": "GPU-1"},
            {"name": "../../etc/passwd"},
            {"size": 1 << 20},
            {"size": -1},
        ):
            with pytest.raises(SyncError):
                open_handle({**window.export_handle(), **wrong}, torch.device("cpu"))
    finally:
        window.close()
    assert not Path("/dev/shm", str(window.export_handle()["name"])).exists()


def nudged(current, name):
    fresh = dict(current)
    fresh[name] = current[name].clone()
    fresh[name].view(-1)[3] += 1
    return fresh


def test_changes_alone_make_the_next_version_and_are_small(pair, folders):
    transport = DeltaTransport()

    async def run():
        async with running_pool(folders.a, urls(pair), transport=transport) as made:
            assert transport.sent == 0, "nobody had anything to change"
            made.current = nudged(made.current, "layers.1.mlp.down.weight")
            await made.sync.publish(Version(number=1))
            return made.current

    expected = asyncio.run(run())
    assert labels(pair) == ["actor-1"] * 2 and all(holds(hosted, expected) for hosted in pair)
    assert 0 < transport.sent < sum(tensor.nbytes for tensor in expected.values()) / 8


def test_a_broken_chain_gets_everything(pair, folders):
    transport = DeltaTransport()

    async def run():
        async with running_pool(folders.a, urls(pair), transport=transport) as made:
            # Somebody calls the weights of one server by another name behind our back.
            await made.clients[1].request("POST", "/update_weight_version", {"new_version": "stray"})
            made.current = nudged(made.current, "norm.weight")
            await made.sync.publish(Version(number=1))
            return made.current

    expected = asyncio.run(run())
    assert labels(pair) == ["actor-1"] * 2 and all(holds(hosted, expected) for hosted in pair)


def test_a_server_whose_bits_are_not_what_the_chain_says_gets_everything(pair, folders):
    async def run():
        async with running_pool(folders.a, urls(pair), transport=DeltaTransport()) as made:
            pair[1].engine.weights()["norm.weight"].data.view(-1)[0] += 1
            made.current = nudged(made.current, "layers.1.mlp.down.weight")
            await made.sync.publish(Version(number=1))
            return made.current

    expected = asyncio.run(run())
    assert labels(pair) == ["actor-1"] * 2 and all(holds(hosted, expected) for hosted in pair)


@pytest.mark.parametrize("transport", [HttpTransport, IpcTransport, DeltaTransport])
def test_of_a_version_that_came_in_part_the_rest_is_kept_and_proven(pair, folders, transport):
    changed = "layers.0.mlp.down.weight"

    async def run():
        async with running_pool(folders.a, urls(pair), transport=transport()) as made:
            made.current = nudged(made.current, changed)
            await made.sync.publish(Version(number=1), only=[changed])
            expected = made.current
            # What is said not to have changed has: the server's rest is not what a late joiner would get, or the run.
            pair[1].engine.weights()["norm.weight"].data.view(-1)[0] += 1
            made.current = nudged(made.current, changed)
            with pytest.raises(SyncError, match=r"norm\.weight has digest"):
                await made.sync.publish(Version(number=2), only=[changed])
            assert labels(pair) == ["actor-1"] * 2
            assert made.sync._committed is not None
            spec = resolve_spec(folders.a, "auto")
            kept = made.sync._committed.tensors
            assert all(torch.equal(kept[name], tensor) for name, tensor in iter_hf_named(spec, expected))
            await made.sync.publish(Version(number=3))
            return expected, made.current

    expected, last = asyncio.run(run())
    assert expected.keys() == last.keys() and all(holds(hosted, last) for hosted in pair)
