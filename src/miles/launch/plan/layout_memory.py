"""Memory of one trainer rank, from the model's spec and the parallel dims."""

from dataclasses import dataclass, replace
from math import prod

from miles.cluster.parallel_dims import ParallelDims
from miles.launch.config import Config
from miles.launch.plan.lora import packs_base
from miles.launch.plan.topology import is_distributed
from miles.models.accounting.activations import RecomputeMode, activation_bytes
from miles.models.accounting.params import (
    BYTES,
    ShardingDegrees,
    list_rank_params,
    moment_bytes,
    packed_weight_bytes,
    rank_bytes,
    rank_gradient_bytes,
    rank_optimizer_bytes,
    unsharded_bytes,
)
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.targets import LoraSpec
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of the fullest rank: what it keeps of a trained model, and what is gathered within a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def get_sharding_degrees(layout: ParallelDims) -> ShardingDegrees:
    """Over how many ranks parameters are sharded."""
    return ShardingDegrees(
        tensor=layout.tensor,
        expert=layout.expert,
        pieces=layout.shard_group_size,
        copies=layout.replicate,
        expert_tensor=layout.expert_tensor,
    )


def estimate_rank_memory(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    *,
    moments: str = "float32",
    optimizer: str = "adam",
    frozen_vision: FrozenVision = TRAINED_VISION,
) -> RankMemory:
    """Memory of a model trained in ``dtype``, ``frozen_vision`` parts excepted."""
    spec, degrees = get_pipeline_stage(spec, layout), get_sharding_degrees(layout)
    return RankMemory(
        weights=rank_bytes(spec, degrees, dtype),
        gradients=rank_gradient_bytes(spec, degrees, frozen_vision),
        optimizer=rank_optimizer_bytes(
            spec, degrees, dtype, moments=moments, optimizer=optimizer, frozen_vision=frozen_vision
        ),
        gathered=unsharded_bytes(spec, degrees, dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRankMemory(RankMemory):
    """Memory with LoRA: also the adapters, and the base weights of adapted modules."""

    base: int
    adapters: int


def estimate_rank_lora_memory(
    spec: DecoderSpec, layout: ParallelDims, dtype: str, lora: LoraSpec, *, moments: str = "float32"
) -> LoraRankMemory:
    """Memory of a model trained with LoRA; every rank has all adapters. The base of unmerged ones is its weights."""
    shards = layout.shard_group_size
    is_packed = spec.quantization is not None and spec.quantization.packed
    base = 0
    if is_packed:
        weights = -(-packed_weight_bytes(spec, dtype) // shards)
    else:
        weights = estimate_rank_frozen_bytes(spec, layout, dtype)
    if not (is_packed or lora.unmerged):
        adapted = {target.param_name for target in lora.targets}
        params = list_rank_params(get_pipeline_stage(spec, layout), get_sharding_degrees(layout))
        base = sum(param.count for param in params if param.name in adapted) * BYTES[dtype]
        if isinstance(spec, HfAdapterSpec):  # in one process, and its parameters are not listed
            base = lora.num_base_parameters * BYTES[dtype]
    return LoraRankMemory(
        weights=weights,
        base=base,
        adapters=4 * lora.num_parameters,
        gradients=4 * lora.num_parameters,
        optimizer=sum(2 * moment_bytes(prod(shape), moments) for shape in lora.list_shapes()),
        gathered=unsharded_bytes(spec, get_sharding_degrees(layout), dtype),
    )


def estimate_rank_frozen_bytes(spec: DecoderSpec, layout: ParallelDims, dtype: str) -> int:
    """Bytes of a frozen model."""
    return rank_bytes(get_pipeline_stage(spec, layout), get_sharding_degrees(layout), dtype, trained=False)


def packs_reference(config: Config) -> bool:
    """Whether the reference holds packed weights: those of a packed base, or it is quantized, in one process, and never
    updated.
    """
    quantized = config.models.train_precision != "auto"
    return packs_base(config) or (quantized and config.train.ref_update_interval is None and not is_distributed(config))


def estimate_rank_activations(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    tokens: int,
    config: TrainConfig,
    *,
    fused: bool,
    lora: LoraSpec | None = None,
) -> int:
    """Bytes of the activations of a micro-batch of ``tokens``, which context ranks share; ``lora`` is what is trained,
    if not all.
    """
    stage = get_pipeline_stage(spec, layout)
    shard = stage if isinstance(stage, HfAdapterSpec) else shard_spec(stage, layout.tensor)
    return activation_bytes(
        shard,
        -(-tokens // layout.context),
        size=BYTES[dtype],
        fused=fused,
        recompute=get_recompute_mode(config),
        first=get_recompute_layers(config),
        sequence=layout.tensor if layout.sequence else 1,
        lora=lora,
        experts=layout.expert,
    )


def get_frozen_vision(config: TrainConfig) -> FrozenVision:
    """The parts of the vision towers of policy and critic that are not trained."""
    return FrozenVision(tower=config.freeze_vision_tower, projector=config.freeze_vision_projector)


def get_recompute_mode(config: TrainConfig) -> RecomputeMode:
    """What the backward pass recomputes."""
    return config.recompute_granularity or ("full" if config.gradient_checkpointing else "none")


def get_recompute_layers(config: TrainConfig) -> int | None:
    """The number of first layers that are recomputed; None for all."""
    return config.recompute_num_layers if config.recompute_method == "block" else None


def get_pipeline_stage(spec: DecoderSpec, layout: ParallelDims) -> DecoderSpec:
    """The layers of the fullest pipeline stage, with embedding and head."""
    if layout.pipeline == 1:
        return spec
    return replace(spec, layers=spec.layers[: -(-len(spec.layers) // layout.pipeline)])
