"""Memory of one trainer rank, from the model's spec and the parallel dims."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import ceil, prod

from miles.backends.megatron.module_choice import list_adapted_parts
from miles.backends.megatron.rank_memory import (
    HeldModel,
    MegatronMemoryFlags,
    RankBytes,
    compute_fullest_rank_bytes,
    list_stage_params,
    parse_memory_flags,
)
from miles.cluster.parallel_dims import MIN_SCANNED_CHUNK, ParallelDims, compute_scan_imbalance
from miles.kernels.numerics import FAST, Numerics
from miles.launch.config import Config
from miles.launch.plan.lora import packs_base
from miles.launch.plan.topology import is_distributed
from miles.models.accounting.activations import (
    MAX_KEPT_LOGIT_GRADS,
    ContextScan,
    RecomputeMode,
    StepMoments,
    list_step_moments,
)
from miles.models.accounting.params import (
    BYTES,
    RankParam,
    ShardingDegrees,
    StagePart,
    list_layer_gradient_bytes,
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
    megatron: MegatronMemoryFlags | None = None,
    stage: int | None = None,
) -> RankMemory:
    """Memory of a model trained in ``dtype`` by FSDP, ``frozen_vision`` parts excepted, or by ``megatron``, of a
    pipeline ``stage`` or of the fullest.
    """
    if megatron is not None:
        held = HeldModel(dtype=dtype, moments=moments, optimizer=optimizer, frozen_vision=frozen_vision)
        return _build_megatron_memory(compute_fullest_rank_bytes(spec, layout, megatron, held, stage))
    degrees = get_sharding_degrees(layout)
    return RankMemory(
        weights=rank_bytes(spec, degrees, dtype),
        gradients=rank_gradient_bytes(spec, degrees, frozen_vision),
        optimizer=rank_optimizer_bytes(
            spec, degrees, dtype, moments=moments, optimizer=optimizer, frozen_vision=frozen_vision
        ),
        gathered=unsharded_bytes(spec, degrees, dtype),
    )


def get_megatron_flags(config: Config, device: str) -> MegatronMemoryFlags | None:
    """Megatron's flags that decide what a rank holds; None with another backend."""
    if config.train.train_backend != "megatron":
        return None
    # Transformer Engine is used on GPUs, where it is installed; not under adapters.
    has_engine = device != "cpu" and not config.lora.is_enabled and find_spec("transformer_engine") is not None
    whole = has_engine or config.models.numerics.batch_invariant
    return parse_memory_flags(config.megatron.megatron_flags, sharded_latents=not whole)


def _build_megatron_memory(held: RankBytes) -> RankMemory:
    return RankMemory(weights=held.weights, gradients=held.gradients, optimizer=held.optimizer, gathered=0)


def estimate_rank_critic_memory(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    *,
    moments: str = "float32",
    optimizer: str = "adam",
    frozen_vision: FrozenVision = TRAINED_VISION,
    megatron: MegatronMemoryFlags | None = None,
    stage: int | None = None,
) -> RankMemory:
    """Memory of a critic: a float32 head on a decoder whose own head, unless it is the embedding, is not trained."""
    head = (spec.hidden_size, 1)
    if megatron is not None:
        held = HeldModel(
            dtype=dtype, moments=moments, optimizer=optimizer, scalar_head=head, frozen_vision=frozen_vision
        )
        return _build_megatron_memory(compute_fullest_rank_bytes(spec, layout, megatron, held, stage))
    degrees = get_sharding_degrees(layout)
    bare = replace(spec, tie_embeddings=True)
    states = sum(2 * moment_bytes(count, moments) for count in head)
    return RankMemory(
        weights=rank_bytes(spec, degrees, dtype) + 4 * sum(head),
        gradients=rank_gradient_bytes(bare, degrees, frozen_vision) + 4 * sum(head),
        optimizer=states
        + rank_optimizer_bytes(bare, degrees, dtype, moments=moments, optimizer=optimizer, frozen_vision=frozen_vision),
        gathered=unsharded_bytes(spec, degrees, dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRankMemory(RankMemory):
    """Memory with LoRA: also the adapters, and the base weights of adapted modules."""

    base: int
    adapters: int


def estimate_rank_lora_memory(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    lora: LoraSpec,
    *,
    moments: str = "float32",
    megatron: MegatronMemoryFlags | None = None,
    stage: int | None = None,
) -> LoraRankMemory:
    """Memory of a model trained with LoRA; every rank has all adapters. The base of unmerged ones is its weights."""
    if megatron is not None:
        megatron = replace(megatron, adapted=list_adapted_parts(spec, lora))
    weights = estimate_rank_frozen_bytes(spec, layout, dtype, megatron=megatron, stage=stage)
    base = 0
    if not (_is_packed(spec) or lora.unmerged):
        adapted = {target.param_name for target in lora.targets}
        params = _list_fullest_params(spec, layout, dtype, megatron, stage)
        base = sum(param.count for param in params if param.name in adapted) * BYTES[dtype]
        if isinstance(spec, HfAdapterSpec):  # in one process, and its parameters are not listed
            base = lora.num_base_parameters * BYTES[dtype]
    return LoraRankMemory(
        weights=weights,
        base=base,
        adapters=4 * lora.num_parameters,
        gradients=4 * lora.num_parameters,
        optimizer=estimate_moment_bytes(lora.list_shapes(), layout, moments, megatron=megatron),
        gathered=0 if megatron is not None else unsharded_bytes(spec, get_sharding_degrees(layout), dtype),
    )


def estimate_moment_bytes(
    shapes: Sequence[tuple[int, ...]],
    layout: ParallelDims,
    moments: str,
    *,
    megatron: MegatronMemoryFlags | None = None,
) -> int:
    """Bytes of the moments of parameters that every rank has; all ranks share them with the distributed optimizer."""
    if megatron is not None and megatron.distributed_optimizer:
        return 2 * moment_bytes(ceil(sum(map(prod, shapes)) / layout.world), "float32")
    return sum(2 * moment_bytes(prod(shape), moments) for shape in shapes)


def _list_fullest_params(
    spec: DecoderSpec, layout: ParallelDims, dtype: str, megatron: MegatronMemoryFlags | None, stage: int | None
) -> Sequence[RankParam]:
    """The parameters of the rank that holds the most of a frozen model, in a pipeline ``stage`` or in all."""
    if megatron is None:
        return list_rank_params(spec, get_sharding_degrees(layout))
    numbers = range(layout.pipeline) if stage is None else (stage,)
    stages = (list_stage_params(spec, layout, megatron, number) for number in numbers)
    found = ([param for chunk in chunks for param in chunk] for chunks in stages)
    return max(found, key=lambda params: sum(param.count * (param.size or BYTES[dtype]) for param in params))


def estimate_rank_frozen_bytes(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    *,
    megatron: MegatronMemoryFlags | None = None,
    stage: int | None = None,
) -> int:
    """Bytes of a frozen model, whose weights may be packed."""
    if megatron is not None:
        megatron = replace(megatron, adapted=megatron.adapted | list_adapted_parts(spec, None))
        held = HeldModel(dtype=dtype, trained=False)
        return compute_fullest_rank_bytes(spec, layout, megatron, held, stage).weights
    if _is_packed(spec):
        return -(-packed_weight_bytes(spec, dtype) // layout.shard_group_size)
    return rank_bytes(spec, get_sharding_degrees(layout), dtype, trained=False)


def _is_packed(spec: DecoderSpec) -> bool:
    return spec.quantization is not None and spec.quantization.packed


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
    longest: int | None = None,
    numerics: Numerics = FAST,
    lora: LoraSpec | None = None,
) -> int:
    """Bytes of the activations of a micro-batch of ``tokens``, which context ranks share, in sequences of at most
    ``longest``; ``lora`` is what is trained, if not all. Of pipeline stages: ``estimate_stage_activations``.
    """
    assert layout.pipeline == 1, "stages hold several micro-batches"
    return list_rank_moments(
        spec, layout, dtype, tokens, config, fused=fused, longest=longest, numerics=numerics, lora=lora
    ).peak


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeak:
    """Bytes of activations and of gradients at the widest moment of a step."""

    activations: int
    gradients: int


def estimate_single_peak(
    spec: DecoderSpec,
    gradients: int,
    dtype: str,
    tokens: int,
    config: TrainConfig,
    *,
    fused: bool,
    longest: int | None = None,
    numerics: Numerics = FAST,
) -> StepPeak:
    """The peak of a step that is one micro-batch of ``tokens``, in one process that trains all parameters.

    Its ``gradients``, which are this many bytes in all, come one layer after the other, as activations go.
    """
    layout = ParallelDims()
    moments = list_rank_moments(
        spec, layout, dtype, tokens, config, fused=fused, longest=longest, numerics=numerics, lora=None
    )
    vocabulary = spec.vocab_rows * spec.hidden_size
    found = [StepPeak(activations=moments.head, gradients=0)]
    behind = 0 if spec.tie_embeddings else 4 * vocabulary
    own = list_layer_gradient_bytes(spec, get_sharding_degrees(layout))
    for wide, saved, more in zip(reversed(moments.layers), reversed(moments.saved), reversed(own), strict=True):
        found.append(StepPeak(activations=wide, gradients=behind))
        behind += more
        found.append(StepPeak(activations=saved, gradients=behind))
    # At last the gradient of the embedding, once in the model's dtype, which that of a tied head is added to.
    found.append(StepPeak(activations=vocabulary * BYTES[dtype], gradients=gradients))
    return max(found, key=lambda each: each.activations + each.gradients)


def list_rank_moments(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    tokens: int,
    config: TrainConfig,
    *,
    fused: bool,
    longest: int | None,
    numerics: Numerics,
    lora: LoraSpec | None,
    stage: StagePart | None = None,
) -> StepMoments:
    """What a rank has at each moment of a micro-batch, in all layers or in those of a pipeline ``stage``."""
    longest = tokens if longest is None else min(longest, tokens)
    chunk = longest // (2 * layout.context)
    shard = spec if isinstance(spec, HfAdapterSpec) else shard_spec(spec, layout.tensor)
    return list_step_moments(
        shard,
        -(-tokens // layout.context),
        size=BYTES[dtype],
        fused=fused,
        recompute=get_counted_recompute(config),
        first=get_recompute_layers(config),
        sequence=layout.tensor if layout.sequence else 1,
        lora=lora,
        experts=layout.expert,
        scan=ContextScan(
            layout.context,
            chunk if chunk >= MIN_SCANNED_CHUNK else None,
            compute_scan_imbalance(tokens, longest, layout.context),
        ),
        keeps_logit_grads=(
            lora is None
            and config.log_probs_chunk_size is None
            and not numerics.batch_invariant
            and max(config.max_tokens_per_gpu, tokens // layout.context) * shard.vocab_size <= MAX_KEPT_LOGIT_GRADS
        ),
        longest=longest,
        gathered=get_sharding_degrees(layout).is_sharded,
        stage=stage,
    )


def get_frozen_vision(config: TrainConfig) -> FrozenVision:
    """The parts of the vision towers of policy and critic that are not trained."""
    return FrozenVision(tower=config.freeze_vision_tower, projector=config.freeze_vision_projector)


def get_recompute_mode(config: TrainConfig) -> RecomputeMode:
    """What the backward pass recomputes."""
    return config.recompute_granularity or ("full" if config.gradient_checkpointing else "none")


def get_counted_recompute(config: TrainConfig) -> RecomputeMode:
    """What is recomputed and not saved; Megatron's ``selective`` is core attention, whose operands are saved."""
    mode = get_recompute_mode(config)
    return "none" if mode == "selective" and config.train_backend == "megatron" else mode


def get_recompute_layers(config: TrainConfig) -> int | None:
    """The number of first layers that are recomputed; None for all."""
    return config.recompute_num_layers if config.recompute_method == "block" else None
