"""What one rank of a trainer reads of what an engine wrote; light, as ranks import it."""

from pathlib import Path

import torch

from miles.algo.config import AlgoConfig
from miles.algo.table import NO_PLUGS, mean_of, reducer_of
from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.sharded import open_sharded
from miles.cluster.layout import Layout
from miles.kernels import arithmetic
from miles.models import hub
from miles.models.families import spec_of
from miles.train.config import TrainConfig
from miles.train.rows import flatten
from miles.train.steps import Reader, micro_batches


def gap_on_a_rank(rank, world, folder, samples, layout, dtype, temperature):
    """How many of this rank's tokens differ from what the engine says of them, and of how many."""
    with arithmetic.using("exact"):
        mesh = Mesh(Layout(world=world, **layout), torch.device("cpu"))
        model = open_sharded(Path(folder), spec_of(hub.read_config(folder)), mesh, dtype=dtype)
        algo = AlgoConfig()
        flat = flatten([[s] for s in samples], reducer_of(algo, NO_PLUGS), mean_of(algo))
        train = TrainConfig(max_tokens_per_gpu=70)
        plan = micro_batches(flat, train, device=torch.device("cpu"), replay=False, peers=mesh.peers)
        found = Reader(temperature=temperature, chunk=5).frozen(model, plan)
    pairs = [(rows, logp) for rows, logp in zip(plan, found, strict=True) if not rows.idle]
    wrong = sum(int((rows.engine_logp_R != logp_R).sum()) for rows, logp_R in pairs)
    return wrong, sum(len(logp_R) for _, logp_R in pairs)
