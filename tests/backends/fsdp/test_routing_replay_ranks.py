"""Routing replay: the experts of an earlier forward, replayed by sharded models and context-parallel ranks."""

from typing import Any

import pytest
import torch
from tests.pool import ranks
from tests.train.small_trainer import MOE, model, ragged, step, weights, worker

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.families import spec_from_config

OWN = {"use_routing_replay": True, "use_tis": True, "tis_batch_normalize": True}
"""With weights of mean 1 log-probs are read before the step, and experts along with them."""
SAMPLES = 8


def together(rank: int, world: int, layout: ParallelDims, share: bool) -> tuple[dict[str, float], dict[str, Any]]:
    mesh = FsdpMesh(layout, torch.device("cpu"))
    shared = FsdpModel(spec_from_config(MOE), mesh, dtype=torch.float32)
    whole = model(MOE).parameters()
    with torch.no_grad():
        for name, parameter in shared.parameters().items():
            parameter.copy_(shared.shard(name, whole[name].detach()))
    shared.after_update()
    how = {"max_tokens_per_gpu": 24, "share_prefix": share}
    metrics = step(worker(shared, algo=OWN, train=how, dp_group=mesh.dp_group), ragged(SAMPLES)).metrics
    return dict(metrics), {n: shared.gather(n, p.detach()).numpy() for n, p in shared.parameters().items()}


@pytest.mark.parametrize(
    "layout",
    [
        ParallelDims(world=2, context=2),
        ParallelDims(world=2, shard=2, expert=2),
        ParallelDims(world=2, tensor=2, sequence=True),
    ],
    ids=["context", "expert", "sequence"],
)
@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
def test_a_step_is_that_of_one_process_and_no_choice_is_another(layout, share):
    trainer = worker(model(MOE), algo=OWN, train={"max_tokens_per_gpu": 24})
    wanted, after = step(trainer, ragged(SAMPLES)).metrics, weights(trainer)
    for metrics, found in ranks(layout.world, together, layout, share):
        assert metrics["routing_mismatch_ratio"] == wanted["routing_mismatch_ratio"] == 0
        assert metrics["expert_imbalance"] == pytest.approx(wanted["expert_imbalance"])
        assert metrics["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        for name, tensor in after.items():
            assert abs(found[name] - tensor.detach().numpy()).max() < 1e-4, name
