"""A publication is taken whole or not at all; a refusal names the tensor, the expectation and the engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import EngineError, SyncError
from miles.core.protocols import SamplingParams
from miles.core.types import Version
from miles.sync.manifest import build_manifest

NAME = "layers.1.attention.qkv.weight"
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)


def serve(tiny, engine):
    (answer,) = tiny.generate_all(engine, [(np.arange(2, 9, dtype=np.int32), GREEDY)])
    return tiny.tokens(answer), answer.spans[0].version.number


def offer(engine, tensors, number=1):
    """Publish as a transport would, with a rollback on refusal."""
    engine.begin(build_manifest(Version(number=number), tensors))
    try:
        for name, tensor in tensors.items():
            engine.receive(name, tensor)
        engine.verify()
    except SyncError:
        engine.rollback()
        raise
    engine.commit()


def test_a_commit_flips_every_tensor_and_the_version_at_once_and_copies_nothing(tiny):
    engine = tiny.engine()
    old = serve(tiny, engine)
    other = tiny.decoder(seed=1)
    tiny.publish(engine, other, number=4)
    new = serve(tiny, engine)
    assert new == (serve(tiny, tiny.engine(other))[0], 4)
    assert old[0] != new[0]
    mine = dict(engine._runner.decoder.named_parameters())
    for name, theirs in other.named_parameters():
        assert mine[name].data_ptr() == theirs.data_ptr()


def test_a_wrong_manifest_is_refused_and_the_old_version_serves_on(tiny):
    engine = tiny.engine()
    before = serve(tiny, engine)
    good = build_manifest(Version(number=1), dict(tiny.decoder(seed=1).named_parameters()))
    by_name = {entry.name: entry for entry in good.entries}
    cases = {
        "missing from the manifest": [e for e in good.entries if e.name != NAME],
        "not a tensor of this model": [*good.entries, replace(by_name[NAME], name="layers.9.surprise")],
        r"has shape \(3, 5\), expected \(64, 32\)": [
            replace(e, shape=(3, 5)) if e.name == NAME else e for e in good.entries
        ],
        r"is torch.bfloat16, expected torch.float32": [replace(e, dtype="torch.bfloat16") for e in good.entries],
    }
    for message, entries in cases.items():
        with pytest.raises(SyncError, match=f"engine 0 refused actor version 1: tensor .* {message}"):
            engine.begin(replace(good, entries=tuple(entries)))
        with pytest.raises(SyncError, match="outside a publication"):
            engine.commit()
        assert serve(tiny, engine) == before


def test_a_wrong_tensor_is_refused_and_the_old_version_serves_on(tiny):
    engine = tiny.engine()
    before = serve(tiny, engine)
    tensors = dict(tiny.decoder(seed=1).named_parameters())
    manifest = build_manifest(Version(number=1), tensors)

    def refused(message, name, tensor):
        engine.begin(manifest)
        with pytest.raises(SyncError, match=message):
            engine.receive(name, tensor)
        engine.rollback()
        assert serve(tiny, engine) == before

    refused("layers.9.surprise is not a tensor of this model", "layers.9.surprise", tensors[NAME])
    refused(rf"{NAME} has shape \(3,\), expected \(64, 32\)", NAME, torch.zeros(3))
    refused(f"{NAME} is torch.float16, expected torch.float32", NAME, tensors[NAME].half())
    with pytest.raises(SyncError, match="outside a publication"):
        engine.receive(NAME, tensors[NAME])
    engine.begin(manifest)
    engine.receive(NAME, tensors[NAME])
    with pytest.raises(SyncError, match=f"{NAME} came twice"):
        engine.receive(NAME, tensors[NAME])


def test_a_tensor_that_did_not_come_or_came_damaged_is_refused_and_the_old_version_serves_on(tiny):
    engine = tiny.engine()
    before = serve(tiny, engine)
    tensors = dict(tiny.decoder(seed=1).named_parameters())
    engine.begin(build_manifest(Version(number=1), tensors))
    for name, tensor in tensors.items():
        if name != NAME:
            engine.receive(name, tensor)
    for check in (engine.verify, engine.commit):
        with pytest.raises(SyncError, match=f"engine 0 refused actor version 1: tensor {NAME} did not come"):
            check()
    assert serve(tiny, engine) == before
    damaged = tensors[NAME].detach().clone()
    damaged.view(torch.int32).view(-1)[7] ^= 1
    engine.receive(NAME, damaged)
    for check in (engine.verify, engine.commit):
        with pytest.raises(SyncError, match=f"{NAME} has digest 0x.*, the manifest says 0x"):
            check()
    assert serve(tiny, engine) == before
    engine.rollback()
    offer(engine, tensors)
    assert serve(tiny, engine)[1] == 1


def test_an_engine_without_weights_refuses_to_write(tiny):
    engine = NativeEngine(
        tiny.spec, device="cpu", dtype=torch.float32, config=NativeConfig(), run=InlineExecutor(), decode=None
    )
    with pytest.raises(EngineError, match="no weights yet"):
        serve(tiny, engine)
