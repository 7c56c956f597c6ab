"""The process groups of a mesh have the ranks that the parallel layout defines."""

import torch
from tests.pool import ranks

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.cluster.parallel_dims import ParallelDims

LAYOUTS = (
    ParallelDims(world=4, shard=2, tensor=2),
    ParallelDims(world=4, replicate=2, shard=2),
    ParallelDims(world=4, replicate=4),
    ParallelDims(world=4, context=2, shard=2, expert=2),
    ParallelDims(world=4, replicate=2, context=2, expert=2),
)


def gather_groups(rank: int, world: int) -> list[dict[str, list[int]]]:
    found = []
    for layout in LAYOUTS:
        mesh = FsdpMesh(layout, torch.device("cpu"))
        me = torch.tensor([rank])
        groups = {
            name: group.all_gather(me).tolist()
            for name, group in vars(mesh).items()
            if name.endswith("_group") and name != "dp_group"
        }
        groups["data parallel"] = [mesh.dp_group.dp_rank, mesh.dp_group.dp_size, int(mesh.dp_group.sum(me.double()))]
        groups["fsdp"] = [] if mesh.shard_mesh is None else mesh.shard_mesh.mesh.flatten().tolist()
        found.append(groups)
    return found


def test_groups_have_the_ranks_of_the_layout():
    for rank, found in enumerate(ranks(4, gather_groups)):
        for layout, groups in zip(LAYOUTS, found, strict=True):
            names = {
                "tp_group": ("tensor",),
                "cp_group": ("context",),
                "shard_group": ("shard", "context"),
                "replica_group": ("replicate",),
                "dp_cp_group": ("replicate", "shard", "context"),
                "ep_group": ("expert",),
                "expert_shard_group": ("expert_data",),
                "world_group": ("replicate", "shard", "context", "tensor"),
            }
            for name, along in names.items():
                group = next(group for group in layout.groups(*along) if rank in group)
                assert groups[name] == group, (layout, name)
            dp_ranks = next(group for group in layout.groups("replicate", "shard") if rank in group)
            assert groups["data parallel"] == [
                layout.data_parallel_rank(rank),
                layout.data_parallel_size,
                sum(dp_ranks),
            ]
            fsdp = next(group for group in layout.groups("replicate", "shard", "context") if rank in group)
            assert sorted(groups["fsdp"]) == fsdp
