"""What one rank of a trainer holds, from the model's spec and the layout alone."""

from dataclasses import dataclass, replace

from miles.cluster.layout import Layout
from miles.models.footprint import (
    BYTES,
    Cut,
    gathered_bytes,
    moment_bytes,
    rank_bytes,
    rank_gradient_bytes,
    rank_optimizer_bytes,
)
from miles.models.foreign.spec import ForeignSpec
from miles.models.lora_targets import Lora
from miles.models.retained import Recompute, activation_bytes
from miles.models.shard import spec_of_rank
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of the fullest rank: what it keeps of a model in training, and what comes and goes within a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def cut_of(layout: Layout) -> Cut:
    """Over how many ranks parameters are cut."""
    return Cut(tensor=layout.tensor, expert=layout.expert, pieces=layout.pieces, copies=layout.replicate)


def held_by_rank(
    spec: DecoderSpec, layout: Layout, dtype: str, *, moments: str = "float32", optimizer: str = "adam"
) -> Held:
    """What a rank keeps of a model that is trained in ``dtype``."""
    spec, cut = stage_of(spec, layout), cut_of(layout)
    return Held(
        weights=rank_bytes(spec, cut, dtype),
        gradients=rank_gradient_bytes(spec, cut),
        optimizer=rank_optimizer_bytes(spec, cut, dtype, moments=moments, optimizer=optimizer),
        gathered=gathered_bytes(spec, cut, dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAdapted(Held):
    """The same where adapters are trained: they, and the base of the matrices they are added to."""

    base: int
    adapters: int


def adapted_by_rank(
    spec: DecoderSpec, layout: Layout, dtype: str, lora: Lora, *, moments: str = "float32"
) -> HeldAdapted:
    """What a rank keeps of a model whose adapters alone are trained, of which every rank has all."""
    return HeldAdapted(
        weights=frozen_by_rank(spec, layout, dtype),
        base=-(-lora.covered // layout.pieces) * BYTES[dtype],
        adapters=4 * lora.parameters,
        gradients=4 * lora.parameters,
        optimizer=sum(
            2 * moment_bytes(lora.rank * size, moments) for t in lora.targets for size in (t.inputs, t.outputs)
        ),
        gathered=gathered_bytes(spec, cut_of(layout), dtype),
    )


def frozen_by_rank(spec: DecoderSpec, layout: Layout, dtype: str) -> int:
    """What a rank keeps of a model that only looks on."""
    return rank_bytes(stage_of(spec, layout), cut_of(layout), dtype, trained=False)


def activations_by_rank(
    spec: DecoderSpec, layout: Layout, dtype: str, tokens: int, config: TrainConfig, *, fused: bool
) -> int:
    """What a rank keeps of a micro-batch of ``tokens`` until its backward pass; context ranks share the tokens."""
    stage = stage_of(spec, layout)
    small = stage if isinstance(stage, ForeignSpec) else spec_of_rank(stage, layout.tensor)
    how = recompute_of(config)
    return activation_bytes(
        small,
        -(-tokens // layout.context),
        size=BYTES[dtype],
        fused=fused,
        recompute=how,
        first=recompute_layers_of(config),
        sequence=layout.tensor if layout.sequence else 1,
    )


def recompute_of(config: TrainConfig) -> Recompute:
    """What a backward pass computes again."""
    return config.recompute_granularity or ("full" if config.gradient_checkpointing else "none")


def recompute_layers_of(config: TrainConfig) -> int | None:
    """In how many of the first layers; None for all."""
    return config.recompute_num_layers if config.recompute_method == "block" else None


def stage_of(spec: DecoderSpec, layout: Layout) -> DecoderSpec:
    """The layers of the fullest pipeline rank, with all that stands around them."""
    if layout.pipeline == 1:
        return spec
    return replace(spec, layers=spec.layers[: -(-len(spec.layers) // layout.pipeline)])
