"""The rings of a mesh talk to whom the layout says, and give what their names promise."""

import torch
from tests.pool import ranks

from miles.backends.fsdp.mesh import Mesh
from miles.cluster.layout import Layout

LAYOUTS = (
    Layout(world=4, shard=2, tensor=2),
    Layout(world=4, replicate=2, shard=2),
    Layout(world=4, replicate=4),
    Layout(world=4, context=2, shard=2, expert=2),
    Layout(world=4, replicate=2, context=2, expert=2),
)


def met(rank: int, world: int) -> list[dict[str, list[int]]]:
    found = []
    for layout in LAYOUTS:
        mesh = Mesh(layout, torch.device("cpu"))
        me = torch.tensor([rank])
        told = {
            name: ring.all_gather(me).tolist()
            for name, ring in vars(mesh).items()
            if name in ("tensor", "context", "pieces", "copies", "rows", "expert", "apart", "everyone")
        }
        told["parts"] = [mesh.peers.part, mesh.peers.parts, int(mesh.peers.sum(me.double()))]
        told["fsdp"] = [] if mesh.shard is None else mesh.shard.mesh.flatten().tolist()
        found.append(told)
    return found


def test_a_rank_meets_those_the_layout_names():
    for rank, found in enumerate(ranks(4, met)):
        for layout, told in zip(LAYOUTS, found, strict=True):
            names = {
                "tensor": ("tensor",),
                "context": ("context",),
                "pieces": ("shard", "context"),
                "copies": ("replicate",),
                "rows": ("replicate", "shard", "context"),
                "expert": ("expert",),
                "apart": ("apart",),
                "everyone": ("replicate", "shard", "context", "tensor"),
            }
            for name, along in names.items():
                group = next(group for group in layout.groups(*along) if rank in group)
                assert told[name] == group, (layout, name)
            parts = next(group for group in layout.groups("replicate", "shard") if rank in group)
            assert told["parts"] == [layout.part(rank), layout.parts, sum(parts)]
            fsdp = next(group for group in layout.groups("replicate", "shard", "context") if rank in group)
            assert sorted(told["fsdp"]) == fsdp
