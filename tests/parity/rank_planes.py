"""What one trainer rank computes for an engine's tokens; few imports, as every rank repeats them."""

from pathlib import Path

import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.models.parallel.split_scans import splitting_all

from miles.algo.config import AlgoConfig
from miles.algo.registry import NO_ALGO_HOOKS, build_reducer, select_metric_reducer
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.batch_tensors import flatten_batch
from miles.train.config import TrainConfig
from miles.train.grad_accumulation import LogprobReader, build_micro_batches


def gap_of_split_scans(*given):
    """``gap_on_a_rank`` where recurrent layers pass states on, of sequences of any length."""
    with splitting_all():
        return gap_on_a_rank(*given)


def gap_on_a_rank(rank, world, folder, samples, layout, dtype, temperature):
    """How many of this rank's tokens differ from what the engine says of them, and of how many."""
    mesh = FsdpMesh(ParallelDims(world=world, **layout), torch.device("cpu"), numerics=BATCH_INVARIANT)
    model = load_fsdp_model(Path(folder), spec_from_config(hf.read_config(folder)), mesh, dtype=dtype)
    algo = AlgoConfig()
    flat = flatten_batch([[s] for s in samples], build_reducer(algo, NO_ALGO_HOOKS), select_metric_reducer(algo))
    train = TrainConfig(max_tokens_per_gpu=70)
    plan = build_micro_batches(flat, train, device=torch.device("cpu"), replay=False, dp_group=mesh.dp_group)
    found = LogprobReader(temperature=temperature, chunk=5).compute_frozen(model, plan)
    pairs = [(rows, logp) for rows, logp in zip(plan, found, strict=True) if not rows.idle]
    wrong = sum(int((rows.engine_logp_R != logp_R).sum()) for rows, logp_R in pairs)
    return wrong, sum(len(logp_R) for _, logp_R in pairs)
