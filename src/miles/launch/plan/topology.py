"""Topology of a run: trainer ranks and parallel dims, engines, elastic splits and Ray resources, from the config.

No torch and no Ray.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

from miles.algo.config import OFFLINE_LOSSES
from miles.cluster.parallel_dims import ParallelDims
from miles.cluster.ray.placement import ResourceRequest
from miles.launch.config import Config
from miles.launch.plan.hardware import choose_device
from miles.schedule.elastic import DeviceSplit, ElasticBounds

# -- trainer ranks --------------------------------------------------------------------------


def get_world_size(c: Config) -> int:
    """Number of trainer ranks."""
    return c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node


def with_ranks(c: Config, ranks: int) -> Config:
    """The same run with this many trainer ranks on this machine."""
    return replace(c, cluster=replace(c.cluster, actor_num_gpus_per_node=ranks))


def is_distributed(c: Config) -> bool:
    """Whether an SPMD group trains; a single fsdp rank that stays single trains in this process instead."""
    if c.observe.debug_rollout_only:
        return False
    return get_world_size(c) > 1 or c.train.train_backend != "fsdp" or c.elastic.elastic


def get_parallel_sizes(c: Config) -> dict[str, int]:
    """Parallel sizes above 1 that take up ranks, by flag."""
    p = c.parallel
    sizes = {
        "--tensor-model-parallel-size": p.tensor_model_parallel_size,
        "--context-parallel-size": p.context_parallel_size,
        "--pipeline-model-parallel-size": p.pipeline_model_parallel_size,
        "--data-parallel-replicate-size": p.data_parallel_replicate_size,
    }
    return {flag: size for flag, size in sizes.items() if size > 1}


def build_parallel_dims(c: Config) -> ParallelDims:
    """How the ranks share model and batch; raises UsageError for sizes that do not fit together."""
    p, world = c.parallel, get_world_size(c)
    return ParallelDims(
        world=world,
        replicate=p.data_parallel_replicate_size,
        shard=max(1, world // math.prod(get_parallel_sizes(c).values())),
        context=p.context_parallel_size,
        tensor=p.tensor_model_parallel_size,
        expert=p.expert_model_parallel_size,
        pipeline=p.pipeline_model_parallel_size,
        expert_tensor=p.expert_tensor_parallel_size,
        sequence=p.sequence_parallel and p.tensor_model_parallel_size > 1,
    )


# -- engines and Ray ------------------------------------------------------------------------


def is_remote(c: Config) -> bool:
    """Whether engines are servers in processes of their own."""
    return c.sglang.rollout_backend != "native" or bool(c.sglang.rollout_external_engine_addrs)


def count_engines(c: Config) -> int:
    """Number of servers to start: as given, or as many as fit on the rollout GPUs."""
    if c.sglang.rollout_num_engines is not None:
        return c.sglang.rollout_num_engines
    total = get_world_size(c) if c.cluster.rollout_num_gpus is None else c.cluster.rollout_num_gpus
    return max(1, total // c.cluster.rollout_num_gpus_per_engine)


def shares_devices(c: Config) -> bool:
    """Whether engines run on the trainer's devices instead of devices of their own."""
    return c.schedule.colocate or c.cluster.rollout_num_gpus is None


def get_engine_devices(c: Config, index: int, offset: int = 0) -> range:
    """The devices of the server with that index: shared ones from the first on, or its own after the trainer's.

    All of them are ``offset`` further where other policies have devices too.
    """
    first = 0 if shares_devices(c) else c.cluster.actor_num_gpus_per_node
    start = offset + first + index * c.cluster.rollout_num_gpus_per_engine
    return range(start, start + c.cluster.rollout_num_gpus_per_engine)


def uses_ray(c: Config) -> bool:
    """Whether a Ray cluster starts the processes of this run."""
    return c.ray.runtime == "ray"


def build_resource_request(c: Config) -> ResourceRequest:
    """What the run requests from the Ray cluster; raises UsageError for sizes that no node could have."""
    starts_servers = is_remote(c) and not c.sglang.rollout_external_engine_addrs
    samples = c.algo.loss_type not in OFFLINE_LOSSES
    return ResourceRequest(
        kind="CPU" if choose_device(c.cluster.device).name == "cpu" else "GPU",
        nodes=c.cluster.actor_num_nodes,
        per_node=c.cluster.actor_num_gpus_per_node,
        engines=count_engines(c) if starts_servers and samples else 0,
        per_engine=c.cluster.rollout_num_gpus_per_engine,
        shared=shares_devices(c),
        workers=c.rollout.reward_num_workers,
    )


# -- elastic splits of the GPUs between trainer and engines -----------------------------------


def get_split(c: Config) -> DeviceSplit:
    """Trainer ranks and engines as the flags give them."""
    return DeviceSplit(get_world_size(c), count_engines(c))


def get_split_bounds(c: Config) -> ElasticBounds:
    e, unit = c.elastic, c.cluster.rollout_num_gpus_per_engine
    return ElasticBounds(min_ranks=e.elastic_min_ranks, min_engines=e.elastic_min_engines, unit=unit)


def with_split(c: Config, split: DeviceSplit) -> Config:
    """The same run with another split."""
    gpus = split.engines * c.cluster.rollout_num_gpus_per_engine
    cluster = replace(c.cluster, actor_num_gpus_per_node=split.ranks, rollout_num_gpus=gpus)
    return replace(c, cluster=cluster, sglang=replace(c.sglang, rollout_num_engines=None))


def list_splits(c: Config) -> list[DeviceSplit]:
    """Every split within the bounds, from most ranks to most engines; empty where the start is outside them."""
    start, bounds = get_split(c), get_split_bounds(c)
    if not bounds.allow(start):
        return []
    fewer, more = start.engines - bounds.min_engines, (start.ranks - bounds.min_ranks) // bounds.unit
    return [bounds.toward_rollout(start, count) for count in range(-fewer, more + 1)]


def restore_split(config: Config, run_dir: Path) -> Config:
    """The config with the last split in the logs of ``run_dir``, where there is one within the bounds."""
    log = run_dir / "logs" / "sessions.jsonl"
    if not config.elastic.elastic or not log.is_file():
        return config
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if '"DevicesMoved"' in line]
    if not rows:
        return config
    split = DeviceSplit(rows[-1]["ranks"], rows[-1]["engines"])
    return with_split(config, split) if split in list_splits(config) else config
