"""In-place weight updates from the trainer's memory: verified, and committed by all servers or by none."""

import asyncio

import pytest
import torch
from tests.backends.remote.harness import LONG, PROMPT, SHORT, client_of, running_pool, url_of, weights_of

from miles.backends.native.server.weights import ipc_inplace
from miles.backends.remote.client import RequestRejected
from miles.backends.remote.pool.engine_pool import EngineSlot, SlotState
from miles.backends.remote.transports.ipc import IpcTransport
from miles.backends.remote.update_protocols import StagedUpdate
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.shared_memory import SharedBuffer

CPU = torch.device("cpu")


def labels(pair):
    return [hosted.server.handler.labels.get(hosted.engine.version) for hosted in pair]


def holds(hosted, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in hosted.engine.weights().items())


def urls(pair):
    return [url_of(hosted) for hosted in pair]


class Resident:
    """Tensors in memory that other processes can look into, as a device's can be; written over in place."""

    def __init__(self, tensors):
        sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors.values()]
        self.window = SharedBuffer(sum(sizes), CPU)
        self.tensors, at, self.shows = {}, 0, 0
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            view = self.window.memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self.tensors[name] = view.copy_(tensor)
            at += size

    def show(self, tensor):
        ours = self.window.memory.untyped_storage().data_ptr()
        if tensor.untyped_storage().data_ptr() != ours:
            return None
        self.shows += 1
        return self.window.export_handle()

    def put(self, tensors):
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)


@pytest.fixture
def memory(folders):
    made = Resident(weights_of(folders.a))
    yield made
    made.window.close()


def publishing(folders, pair, memory, then):
    """Version 0, and 1 the same: from then on the trainer's memory is known to stay."""

    async def run():
        async with running_pool(folders.a, urls(pair), transport=IpcTransport(export=memory.show)) as made:
            made.current = memory.tensors
            await made.sync.publish(Version(number=1))
            return await then(made)

    return asyncio.run(run())


def total(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def test_servers_write_what_stays_where_it_is_into_the_tensors_they_have(pair, folders, memory):
    async def then(made):
        assert memory.shows == 0, "what is there for the first time may be gone the next"
        memory.put(weights_of(folders.b))
        reported = await made.sync.publish(Version(number=2))
        assert (memory.shows, reported["publish/bytes"]) == (2, total(memory.tensors))
        before = [hosted.engine.weights()["norm.weight"].data_ptr() for hosted in pair]
        memory.put(weights_of(folders.a))
        await made.sync.publish(Version(number=3))
        assert all(holds(hosted, weights_of(folders.a)) for hosted in pair)
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=4))
        assert before == [hosted.engine.weights()["norm.weight"].data_ptr() for hosted in pair]
        assert memory.shows == 2, "servers are notified once"
        return await made.pool.generate(PROMPT, SHORT)

    assert publishing(folders, pair, memory, then).spans[0].version == Version(number=4)
    assert labels(pair) == ["actor-4"] * 2 and all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_what_one_server_wrote_otherwise_puts_all_of_them_back(pair, folders, memory, monkeypatch):
    """A bit that flips on its way into the second server: the first had written everything, and has the old again."""
    tallies = []

    class Spoiled(ipc_inplace.ChecksumBatch):
        def __init__(self, tensors, into=None):
            super().__init__(tensors, into)
            tallies.append(self)
            self._spoils = len(tallies) == 2
            self._second = None if into is None else into[1]

        def start(self):
            for tensor in self._tensors[1:2] if self._spoils else ():
                tensor.view(-1).view(torch.uint8)[5] ^= 1
            super().start()

    async def then(made):
        memory.put(weights_of(folders.b))
        with monkeypatch.context() as patch:
            patch.setattr(ipc_inplace, "ChecksumBatch", Spoiled)
            with pytest.raises(SyncError, match=r"engine \d wrote \S+ in place with digest \d+, but the sender's is"):
                await made.sync.publish(Version(number=2))
        assert len(tallies) == 2 and labels(pair) == ["actor-1"] * 2
        assert all(holds(hosted, weights_of(folders.a)) for hosted in pair)
        assert not any(hosted.engine.is_paused for hosted in pair)
        answer = await made.pool.generate(PROMPT, SHORT)
        assert answer.spans[0].version == Version(number=1)
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=3))

    publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-3"] * 2 and all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_a_server_that_looks_into_that_memory_no_more_is_sent_windows_and_told_anew(pair, folders, memory):
    async def then(made):
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=2))
        pair[1].server.admin._staging.writer.unmap()
        memory.put(weights_of(folders.a))
        await made.sync.publish(Version(number=3))
        assert any("engine 1 does not write in place" in said for said in made.said)
        assert all(holds(hosted, weights_of(folders.a)) for hosted in pair)
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=4))
        memory.put(weights_of(folders.a))
        await made.sync.publish(Version(number=5))
        assert memory.shows > 2, "from the one after on it writes in place again"

    publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-5"] * 2 and all(holds(hosted, weights_of(folders.a)) for hosted in pair)


def test_tensors_that_lie_elsewhere_are_not_written_from_where_they_lay(pair, folders, memory):
    async def then(made):
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=2))
        made.current = {name: tensor.clone() for name, tensor in weights_of(folders.a).items()}
        await made.sync.publish(Version(number=3))
        assert all(holds(hosted, weights_of(folders.a)) for hosted in pair)
        for tensor in made.current.values():  # stays, but in memory that nobody can look into
            tensor.add_(1)
        await made.sync.publish(Version(number=4))
        assert any("memory that another process cannot map" in said for said in made.said)
        assert memory.shows == 2
        return made.current

    expected = publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-4"] * 2 and all(holds(hosted, expected) for hosted in pair)


def test_of_a_model_that_is_mostly_frozen_the_rest_alone_is_written_and_all_of_it_proven(pair, folders, memory):
    trained = "layers.1.mlp.down.weight"

    async def then(made):
        sent = []
        for number in (2, 3, 4):
            memory.tensors[trained].add_(1)
            sent.append((await made.sync.publish(Version(number=number)))["publish/bytes"])
            assert all(holds(hosted, memory.tensors) for hosted in pair)
        assert sent == [total(memory.tensors)] * 2 + [memory.tensors[trained].nbytes], "the first two show what moves"
        pair[1].engine.weights()["norm.weight"].data.view(-1)[0] += 1
        memory.tensors[trained].add_(1)
        reported = await made.sync.publish(Version(number=5))
        assert any("engine 1 has another model.norm.weight than it was sent" in said for said in made.said)
        assert reported["publish/bytes"] == total(memory.tensors)

    publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-5"] * 2 and all(holds(hosted, memory.tensors) for hosted in pair)


def test_who_joins_after_weights_were_written_in_place_is_given_them(pair, folders, memory):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])], transport=IpcTransport(export=memory.show)) as made:
            made.current = memory.tensors
            await made.sync.publish(Version(number=1))
            memory.put(weights_of(folders.b))
            await made.sync.publish(Version(number=2))
            late, client = EngineSlot("late"), client_of(url_of(pair[1]), "late")
            made.clients.append(client)
            await made.sync.join(late, client)
            assert (late.state, late.version) == (SlotState.SERVING, Version(number=2))

    asyncio.run(run())
    assert labels(pair) == ["actor-2"] * 2 and all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_a_server_writes_only_while_it_rests_only_what_it_was_told_of_and_commits_only_what_is_proven(
    pair, folders, memory
):
    async def then(made):
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=2))
        line = made.sync._targets.connected[made.pool.slots[0]]
        assert isinstance(line, StagedUpdate)
        assert made.sync._writer is not None and made.sync._writer._mapped is not None
        epoch = made.sync._writer._mapped.epoch
        with pytest.raises(RequestRejected, match="only while generation is paused"):
            await line.write_in_place(epoch, None)
        await made.pool.pause()
        try:
            with pytest.raises(RequestRejected, match="map it first"):
                await line.write_in_place("another", None)
            with pytest.raises(RequestRejected, match="which has 1 bytes"):
                await line.write_in_place(epoch, "AA==")
            line.expected_digests = "AAAA"
            with pytest.raises(RequestRejected, match="nothing written to commit"):
                await line.commit("stray")
            await line.write_in_place(epoch, None)
            assert pair[0].engine.is_paused
            with pytest.raises(RequestRejected, match="tensors"):
                await line.commit("stray")
            await made.pool.resume()
            assert pair[0].engine.is_paused, "unproven weights answer nobody"
            await made.pool.pause()
        finally:
            await made.pool.resume()
        assert labels(pair) == ["actor-2"] * 2
        await made.sync._rollback([line])
        assert not pair[0].engine.is_paused
        return await made.pool.generate(PROMPT, SHORT)

    assert publishing(folders, pair, memory, then).spans[0].version == Version(number=2)
    assert all(holds(hosted, weights_of(folders.b)) for hosted in pair)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"names": ["nonsense"]}, "not a tensor of this model"),
        ({"dtypes": ["bfloat16"]}, "and here it is"),
        ({"offsets": [1 << 40]}, "is not within its storage"),
        ({"lie_in": [7]}, "which is not possible"),
        ({"offsets": []}, "lists of one length"),
    ],
)
def test_a_layout_that_is_not_the_models_is_refused(pair, folders, memory, spoil, words):
    async def then(made):
        line = made.sync._targets.connected[made.pool.slots[0]]
        assert isinstance(line, StagedUpdate)
        direct = made.sync._writer
        assert direct is not None and direct.is_resident(memory.tensors)
        layout = direct._describe(memory.tensors)
        assert layout is not None
        columns = {name: list(column) for name, column in layout.columns.items()}
        for name, first in spoil.items():
            columns[name] = [*first, *columns[name][1:]]
        body = {"action": "map", "epoch": "e", "storages": [memory.window.export_handle()], **columns}
        with pytest.raises(RequestRejected, match=words):
            await line._post(body)

    publishing(folders, pair, memory, then)


def test_digests_that_were_taken_ahead_are_those_of_what_is_published_even_if_it_changed_since(pair, folders, memory):
    async def then(made):
        made.sync.start_digests()  # nobody writes in place yet
        await made.sync.publish(Version(number=2))
        direct = made.sync._writer
        assert direct is not None
        for number, late in ((3, False), (4, True), (5, False)):
            memory.put(weights_of(folders.b if number % 2 else folders.a))
            made.sync.start_digests()
            taken = direct.digests()
            if late:
                memory.tensors["norm.weight"].add_(1)
            await made.sync.publish(Version(number=number))
            assert (direct.digests() is taken) != late
            assert all(holds(hosted, memory.tensors) for hosted in pair)
        late = dict(memory.tensors, **{"norm.weight": memory.tensors["norm.weight"].clone()})
        made.current = late
        made.sync.start_digests()  # of tensors that lie elsewhere now: they go through windows
        await made.sync.publish(Version(number=6))

    publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-6"] * 2 and all(holds(hosted, memory.tensors) for hosted in pair)


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_requests_under_way_while_weights_are_written_go_on_under_the_new_ones(pair, folders, memory, mode):
    async def then(made):
        await made.sync.publish(Version(number=2))
        made.pool.mode = mode
        heard = asyncio.Event()
        asking = asyncio.create_task(made.pool.generate_stream(PROMPT, LONG, lambda tokens: heard.set()))
        await asyncio.wait_for(heard.wait(), 60)
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=3))
        return await asking

    spans = publishing(folders, pair, memory, then).spans
    assert [span.version.number for span in spans] == [2, 3], "some were drawn before, and the request was long"
    assert sum(len(span.tokens) for span in spans) == LONG.max_new_tokens
    assert all(holds(hosted, weights_of(folders.b)) for hosted in pair)


def test_whom_somebody_else_holds_still_stays_so_when_it_has_committed(pair, folders, memory):
    async def then(made):
        await made.sync.publish(Version(number=2))
        await made.pool.pause()
        memory.put(weights_of(folders.b))
        await made.sync.publish(Version(number=3))
        assert all(hosted.engine.is_paused for hosted in pair)
        await made.pool.resume()
        assert not any(hosted.engine.is_paused for hosted in pair)

    publishing(folders, pair, memory, then)
    assert labels(pair) == ["actor-3"] * 2 and all(holds(hosted, weights_of(folders.b)) for hosted in pair)
