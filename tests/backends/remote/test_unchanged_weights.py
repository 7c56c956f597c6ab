"""Only changed weights are sent: of a frozen model its trained part, of merged adapters their matrices."""

import asyncio

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.backends.remote.harness import client_of, running_pool, url_of, weights_of
from tests.tiers import examples

from miles.backends.remote.committed_weights import select_changed
from miles.backends.remote.pool.engine_pool import EngineSlot, SlotState
from miles.backends.remote.transports.buckets import iter_hf_named, pack_bucket, split_into_buckets
from miles.backends.remote.transports.delta import DeltaTransport
from miles.backends.remote.transports.ipc import IpcTransport
from miles.backends.remote.transports.senders import DiskTransport, HttpTransport
from miles.core.types import Version
from miles.models.resolve import resolve_spec


def holds(hosted, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in hosted.engine.weights().items())


def labels(pair):
    return [hosted.server.handler.labels.get(hosted.engine.version) for hosted in pair]


def urls(pair):
    return [url_of(hosted) for hosted in pair]


def size(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def merged(current, names, seed):
    """The weights after a step in which adapters of rank 2 on these matrices were all that was trained."""
    draw = torch.Generator().manual_seed(seed)
    fresh = dict(current)
    for name in names:
        rows, columns = current[name].shape
        up, down = torch.randn(rows, 2, generator=draw), torch.randn(2, columns, generator=draw)
        fresh[name] = current[name] + 0.01 * (up @ down)
    return fresh


def carried_by(transport, root, folders):
    made = {
        "tensor": HttpTransport,
        "ipc": IpcTransport,
        "delta": DeltaTransport,
        "disk": lambda: DiskTransport(root / "weights", folders.a),
    }
    return made[transport]()


@pytest.mark.parametrize("transport", ["tensor", "ipc", "delta", "disk"])
def test_only_the_matrices_that_adapters_are_merged_into_travel_and_engines_hold_the_whole(
    pair, folders, tmp_path, transport
):
    adapted = ["layers.0.attention.output.weight", "layers.1.mlp.down.weight"]

    async def run():
        sender = carried_by(transport, tmp_path, folders)
        async with running_pool(folders.a, urls(pair), transport=sender, bucket_bytes=9_000) as made:
            assert all(name in made.current for name in adapted)
            everything, sent = size(made.current), []
            for number in (1, 2):
                made.current = merged(made.current, adapted, number)
                reported = await made.sync.publish(Version(number=number))
                sent.append(reported["publish/bytes"])
                assert labels(pair) == [f"actor-{number}"] * 2
                assert all(holds(hosted, made.current) for hosted in pair)
            reported = await made.sync.publish(Version(number=3))
            assert labels(pair) == ["actor-3"] * 2 and reported["publish/bytes"] == 0, "nothing had changed"
            return made.current, sent, everything

    expected, sent, everything = asyncio.run(run())
    moved = size({name: expected[name] for name in adapted})
    if transport != "delta":  # which packs what it sends
        assert sent == [moved, moved]
    assert all(holds(hosted, expected) for hosted in pair) and max(sent) <= moved < everything / 4


@pytest.mark.parametrize("transport", [HttpTransport, IpcTransport])
def test_who_joins_after_publications_in_part_is_given_everything(pair, folders, transport):
    async def run():
        async with running_pool(folders.a, [url_of(pair[0])], transport=transport()) as made:
            for number in (1, 2):
                made.current = merged(made.current, [f"layers.{number - 1}.mlp.down.weight"], number)
                await made.sync.publish(Version(number=number))
            pair[1].call(pair[1].engine.flush_cache())
            for tensor in pair[1].engine.weights().values():
                tensor.data.fill_(0.5)
            late, client = EngineSlot("late"), client_of(url_of(pair[1]), "late")
            made.clients.append(client)
            await made.sync.join(late, client)
            assert (late.state, late.version) == (SlotState.SERVING, Version(number=2))
            assert made.sync._committed is not None
            spec, kept = resolve_spec(folders.a, "auto"), made.sync._committed.tensors
            assert all(torch.equal(kept[name], tensor) for name, tensor in iter_hf_named(spec, made.current))
            return made.current

    expected = asyncio.run(run())
    assert all(holds(hosted, expected) for hosted in pair)


@pytest.mark.parametrize("transport", [HttpTransport, IpcTransport, DeltaTransport])
def test_a_server_that_lost_what_it_was_to_keep_is_sent_everything_and_that_is_said(pair, folders, transport):
    async def run():
        async with running_pool(folders.a, urls(pair), transport=transport()) as made:
            pair[1].engine.weights()["norm.weight"].data.view(-1)[0] += 1
            made.current = merged(made.current, ["layers.1.mlp.down.weight"], 5)
            reported = await made.sync.publish(Version(number=1))
            assert any("engine 1 has another model.norm.weight than it was sent" in said for said in made.said)
            return made.current, reported["publish/bytes"]

    expected, sent = asyncio.run(run())
    assert labels(pair) == ["actor-1"] * 2 and all(holds(hosted, expected) for hosted in pair)
    assert sent == size(expected) or transport is DeltaTransport


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_changes_engines_hold_it_and_no_byte_more_is_sent(pair, folders, data):
    transport = data.draw(st.sampled_from([HttpTransport, IpcTransport]))
    spec = resolve_spec(folders.a, "auto")
    names = [name for name, _ in iter_hf_named(spec, weights_of(folders.a))]
    steps = data.draw(st.lists(st.sets(st.sampled_from(names)), min_size=1, max_size=3))

    async def run():
        async with running_pool(folders.a, urls(pair), transport=transport(), bucket_bytes=20_000) as made:
            for number, changed in enumerate(steps, 1):
                made.current = {name: tensor.clone() for name, tensor in made.current.items()}
                theirs = dict(iter_hf_named(spec, made.current))
                for name in changed:  # a part of what the engine has as one tensor, such as the keys of an attention
                    theirs[name].view(-1)[number] += 1
                reported = await made.sync.publish(Version(number=number))
                assert reported["publish/bytes"] == sum(theirs[name].nbytes for name in changed)
                assert all(holds(hosted, made.current) for hosted in pair)

    asyncio.run(run())


def test_tensors_that_sglang_fuses_are_sent_together_or_not_at_all():
    shared = "model.layers.0.self_attn"
    names = [f"{shared}.{each}" for each in ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")]
    names += [f"{shared}.{each}.weight_scale_inv" for each in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors = {name: torch.full((8,), float(i)) for i, name in enumerate(names)}
    buckets = [[name for name, _ in group] for group in split_into_buckets(tensors.items(), 32)]
    assert buckets == [[names[0], names[2]], [names[1]], names[3:]]
    bucket = pack_bucket([(name, tensors[name]) for name in buckets[0]])
    assert list(select_changed(bucket, bucket.digests).tensors) == []
    assert list(select_changed(bucket, {**bucket.digests, names[2]: 0}).tensors) == buckets[0]
