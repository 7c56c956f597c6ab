"""A publication reaches every engine or none."""

import asyncio

import pytest
import torch

from miles.cluster.executor import InlineExecutor
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.manifest import compute_digest
from miles.sync.publish import Publication


class Engine:
    """The smallest honest receiver; ``damage`` is done to what arrives."""

    def __init__(self, name, damage=None):
        self.name, self.damage = name, damage
        self.version, self.weights, self.staged, self.manifest, self.own = None, {}, {}, None, {}

    def begin(self, manifest):
        self.manifest, self.staged = manifest, {}

    def receive(self, name, tensor, *, own):
        self.own[name] = own
        self.staged[name] = self.damage(tensor) if self.damage else tensor

    def verify(self):
        for entry in self.manifest.entries:
            if entry.name not in self.staged or compute_digest(self.staged[entry.name]) != entry.digest:
                raise SyncError(f"{entry.name} arrived damaged at {self.name}")

    def commit(self):
        self.version, self.weights = self.manifest.version, self.staged

    def rollback(self):
        self.staged, self.manifest = {}, None


def publish(weights, engines, transport, number=1):
    job = Publication(weights=lambda: weights, engines=engines, transport=transport, run=InlineExecutor())
    asyncio.run(job.publish(Version(number=number)))


def test_shared_moves_no_byte_and_copy_gives_storage_of_its_own():
    weights = {"w": torch.randn(3, 3), "v": torch.randn(2)}
    near, far = Engine("near"), Engine("far")
    publish(weights, [near], "shared")
    publish(weights, [far], "copy")
    for name, tensor in weights.items():
        assert near.weights[name].data_ptr() == tensor.data_ptr()
        assert far.weights[name].data_ptr() != tensor.data_ptr() and torch.equal(far.weights[name], tensor)
    weights["w"].add_(1)
    assert torch.equal(near.weights["w"], weights["w"]) and not torch.equal(far.weights["w"], weights["w"])


def test_what_an_engine_may_write_over_is_what_nobody_else_has():
    weights = {"w": torch.randn(3, 3), "v": torch.randn(2)}
    for transport, count, own in (("shared", 1, False), ("copy", 2, True), ("made", 1, True), ("made", 2, False)):
        engines = [Engine(str(i)) for i in range(count)]
        publish(weights, engines, transport)
        assert all(engine.own == {"w": own, "v": own} for engine in engines), (transport, count)
    engine = Engine("of a base with one matrix that moves")
    job = Publication(weights=lambda: weights, engines=[engine], transport="copy", run=InlineExecutor(), trained={"v"})
    asyncio.run(job.publish(Version(number=1)))
    assert engine.own == {"w": False, "v": True}


def test_one_engine_that_gets_a_wrong_bit_keeps_all_engines_on_the_version_before():
    weights = {"w": torch.randn(3, 3)}
    good, bad = Engine("good"), Engine("bad")
    publish(weights, [good, bad], "copy", number=1)
    before = good.weights["w"]
    bad.damage = lambda tensor: tensor + 1e-7
    with pytest.raises(SyncError, match="w arrived damaged at bad"):
        publish({"w": torch.randn(3, 3)}, [good, bad], "copy", number=2)
    assert good.version == bad.version == Version(number=1)
    assert good.weights["w"] is before and good.staged == {} and bad.staged == {}
    bad.damage = None
    publish(weights, [good, bad], "copy", number=3)
    assert good.version == bad.version == Version(number=3)


def test_publishing_to_nobody_is_allowed():
    publish({"w": torch.zeros(1)}, [], "shared")
