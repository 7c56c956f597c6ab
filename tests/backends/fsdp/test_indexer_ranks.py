"""Tensor-parallel ranks replay the blocks of their own key-value heads: the step of one process."""

from pathlib import Path

import pytest
from tests.backends.fsdp.indexer_ranks import replay_on_ranks
from tests.backends.megatron import cases
from tests.backends.megatron.family_cases import BLOCKS, block_samples, write_family
from tests.pool import ranks

from miles.cluster.parallel_dims import ParallelDims

LAYOUTS = {
    2: (ParallelDims(world=2, tensor=2), ParallelDims(world=2, tensor=2, sequence=True)),
    4: (ParallelDims(world=4, tensor=4), ParallelDims(world=4, tensor=2, context=2, sequence=True)),
}


@pytest.mark.parametrize("world", LAYOUTS)
def test_ranks_replay_the_blocks_of_their_own_heads(tmp_path: Path, world: int):
    """Of four ranks two have the same key-value head, and are counted once."""
    write_family(folder := tmp_path / "model", BLOCKS)
    batch, algo = block_samples(), {"use_rollout_routing_replay": True, "use_rollout_indexer_replay": True}
    wanted = cases.alone(folder, batch, algo)
    assert wanted["metrics"]["indexer_mismatch_ratio"] > 0.01
    plain = cases.alone(folder, batch, {"use_rollout_routing_replay": True})
    assert cases.apart(plain["grads"], wanted["grads"], 1e-3), "the blocks make no difference"
    for found in ranks(world, replay_on_ranks, folder, LAYOUTS[world], batch, algo):
        for each in found:
            assert not cases.unlike(each["metrics"], wanted["metrics"])
            assert not cases.apart(each["grads"], wanted["grads"], 1e-4)
            assert not cases.apart(each["after"], wanted["after"], 1e-4)
