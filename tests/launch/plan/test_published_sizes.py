"""Every published size on both backends and several layouts: it is planned, and its ranks together hold the model."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from tests.launch.small_config import furnish

from miles.backends.megatron.module_choice import can_use_transformer_engine
from miles.backends.megatron.rank_memory import MegatronMemoryFlags, list_stage_params
from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.launch.plan.layout_memory import get_sharding_degrees
from miles.launch.plan.memory import estimate_memory
from miles.launch.plan.render import as_text
from miles.launch.read_config import read
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import list_rank_params, parameter_count
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import Shape, param_shape
from miles.models.families import spec_from_config
from miles.models.parallel.tp_sharding import TpShard, compute_tp_shards
from miles.models.spec import DecoderSpec

NAMES = tuple(load_known_models())
FEW = ("Qwen3-0.6B", "Qwen3-30B-A3B", "Moonlight-16B-A3B")
FSDP = (
    ParallelDims(world=8, shard=8),
    ParallelDims(world=16, replicate=2, shard=4, tensor=2),
    ParallelDims(world=16, shard=4, tensor=2, context=2, expert=4),
)
MEGATRON = (
    ParallelDims(world=8, shard=4, tensor=2, sequence=True),
    ParallelDims(world=16, shard=4, tensor=2, pipeline=2, sequence=True),
    ParallelDims(world=16, shard=8, tensor=2, sequence=True, expert=8, expert_tensor=1),
)
EXPERTS = ("gate_up", "up", "down", "gate_up_bias", "down_bias")
WHOLE = (".moe.correction", ".moe.expert_table", ".ngram.multipliers", ".ngram.sizes", ".ngram.offsets")


def is_expert(name: str) -> bool:
    return ".moe." in name and name.split(".moe.")[1] in EXPERTS


def shapes_of(spec: DecoderSpec) -> dict[str, Shape]:
    """Every parameter of the whole model, from the map that reads checkpoints."""
    return {name: tuple(param_shape(slices)) for name, slices in build_param_map(spec).items()}


def cut(shape: Shape, shard: TpShard, world: int) -> Shape:
    """A tensor-parallel rank's part, padding included."""
    if not shard.segments or world == 1:
        return shape
    rows = sum(segment.units_per_rank(world) * segment.rows for segment in shard.segments)
    return (*shape[: shard.dim], rows, *shape[shard.dim + 1 :])


def pad(count: int, world: int) -> int:
    return -(-count // world) * world


def sum_fsdp_ranks(spec: DecoderSpec, layout: ParallelDims) -> tuple[int, int]:
    """What all ranks of FSDP together hold, and how much of it is padding or repeated key-value heads."""
    shards, total, padding = compute_tp_shards(spec), 0, 0
    for name, shape in shapes_of(spec).items():
        part, copies = cut(shape, shards[name], layout.tensor), layout.replicate * layout.tensor
        world = layout.shard_group_size
        if name.endswith(WHOLE):
            total += prod(part) * layout.world
            continue
        if is_expert(name) and layout.expert > 1:
            world //= layout.expert
            rows = [pad(part[0] // layout.expert, world), part[0] // layout.expert * pad(part[1], world) // part[1]]
            held = min(rows) * layout.expert * prod(part[1:])
        else:
            held = pad(part[0], world) * prod(part[1:])
        distinct = prod(shape) * (layout.replicate if shards[name].segments else copies)
        total += held * copies
        padding += held * copies - distinct
    return total, padding


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_of_fsdp_together_hold_a_published_model(name: str):
    spec = spec_from_config(load_known_models()[name])
    shapes = shapes_of(spec)
    assert sum(map(prod, shapes.values())) == parameter_count(spec)
    layouts = [layout for layout in FSDP if layout.find_model_problem(spec) is None]
    assert layouts
    for layout in layouts:
        held = layout.world * sum(param.count for param in list_rank_params(spec, get_sharding_degrees(layout)))
        total, padding = sum_fsdp_ranks(spec, layout)
        # Two shared experts in one tensor are few rows for the ranks of Inkling; 60 experts on 8 ranks become 64.
        assert held == total and padding < 0.06 * total, layout
        # Every value is on each replica once; what tensor-parallel ranks do not shard is on each of them.
        assert (total - padding) >= layout.replicate * parameter_count(spec)


def is_all_megatron(name: str) -> bool:
    """Whether all layers are Megatron's; what ranks hold of the decoder's modules is an estimate."""
    return can_use_transformer_engine(spec_from_config(load_known_models()[name]))


@pytest.mark.parametrize("name", [name for name in NAMES if is_all_megatron(name)])
def test_the_ranks_of_megatron_together_hold_a_published_model(name: str):
    spec = spec_from_config(load_known_models()[name])
    shards, flags = compute_tp_shards(spec), MegatronMemoryFlags(sharded_latents=False)
    for layout in MEGATRON:
        if check_megatron_support(spec, layout) is not None:
            continue
        own = layout.expert_tensor or layout.tensor
        per_stage = layout.world // layout.pipeline
        wanted = 0
        for param, shape in shapes_of(spec).items():
            if is_expert(param):  # each expert's channels are on as many ranks as there are replicas of experts
                wanted += prod(shape) * (per_stage // (own * layout.expert))
            elif shards[param].segments:
                stages = 2 if param == "embedding.weight" and spec.tie_embeddings and layout.pipeline > 1 else 1
                wanted += prod(cut(shape, shards[param], layout.tensor)) * per_stage * stages
            else:
                wanted += prod(shape) * per_stage
        stages = [list_stage_params(spec, layout, flags, stage) for stage in range(layout.pipeline)]
        held = per_stage * sum(param.count for chunks in stages for chunk in chunks for param in chunk)
        assert held == wanted, layout
        layers = [p.name.split(".")[1] for chunks in stages for chunk in chunks for p in chunk if "layers." in p.name]
        assert sorted(set(layers), key=int) == [str(i) for i in range(spec.num_layers)]


LINES = {
    "fsdp": (
        "--actor-num-gpus-per-node 8",
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2",
        "--actor-num-gpus-per-node 8 --actor-num-nodes 2 --context-parallel-size 2 --expert-model-parallel-size 8",
    ),
    "megatron": (
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel",
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --megatron-use-distributed-optimizer --use-kl-loss",
        "--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --megatron-use-distributed-optimizer "
        "--advantage-estimator ppo",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_published_size_is_planned_on_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(dict(load_known_models()[name])))
    planned = 0
    for backend, lines in LINES.items():
        for line in lines:
            words = [
                "good.toml",
                "--hf-checkpoint",
                name,
                "--device",
                "cuda",
                "--train-backend",
                backend,
                *line.split(),
            ]
            try:
                config, plan, origins = read("plan", words)
            except UsageError as error:  # a model without experts, or one that the backend refuses, in sentences
                assert error.problems and all(problem.endswith((".", "?")) for problem in error.problems)
                continue
            spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
            assert spec is not None
            shares = {share.name: share.bytes for share in estimate_memory(config, plan, spec)}
            assert min(shares.values()) >= 0 and shares["weights"] > 0 < shares["optimizer"]
            assert as_text(config, plan, origins, every=False)
            planned += 1
    assert planned >= 1


@pytest.mark.parametrize("name", FEW)
def test_some_published_sizes_are_held_by_their_ranks(name: str):
    test_the_ranks_of_fsdp_together_hold_a_published_model(name)
    test_the_ranks_of_megatron_together_hold_a_published_model(name)


def test_plans_of_ranks_need_no_torch():
    line = (
        "import miles.launch.plan.memory, miles.backends.megatron.rank_memory, sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", line], check=True)
