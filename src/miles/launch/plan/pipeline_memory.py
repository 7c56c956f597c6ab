"""Activations of a pipeline stage: those of the micro-batches in flight, at the widest moment of its schedule."""

from dataclasses import dataclass
from math import ceil

from miles.backends.megatron.pipeline_schedule import PipelineSchedule, PipelineStep
from miles.backends.megatron.rank_memory import MegatronMemoryFlags, split_layers
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.numerics import FAST, Numerics
from miles.launch.plan.layout_memory import list_rank_moments
from miles.models.accounting.activations import StepMoments
from miles.models.accounting.params import BYTES, StagePart
from miles.models.lora.targets import LoraSpec
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """At most so many micro-batches in an optimizer step of a rank, and tokens in all of them; None: of any number."""

    micro_batches: int | None = None
    tokens: int | None = None


def bound_step_counts(
    samples: int, longest: int, ranks: int, tokens: int, *, samples_each: int | None = None, limited: bool = False
) -> StepCounts:
    """Bound the micro-batches of one of ``ranks`` in a step of ``samples`` of up to ``longest`` tokens.

    They have up to ``tokens``, or ``samples_each``; if something else has a limit too (``limited``), one may have a
    single sample. Two of them together have more tokens than one may have.

    >>> bound_step_counts(64, 1000, 2, 16000)
    StepCounts(micro_batches=4, tokens=64000)
    """
    each = ceil(samples / ranks)
    if samples_each is not None:
        return StepCounts(micro_batches=ceil(each / samples_each), tokens=samples * longest)
    packed = samples if limited else min(samples, max(1, ceil(2 * samples * longest / tokens) - 1))
    own = each if limited else min(each, max(1, ceil(2 * each * longest / tokens) - 1))
    return StepCounts(micro_batches=max(ceil(packed / ranks), own), tokens=samples * longest)


def list_stage_steps(
    layout: ParallelDims, stage: int, flags: MegatronMemoryFlags, counts: StepCounts
) -> list[PipelineStep]:
    """List the different backward passes of a stage, with the micro-batches in flight."""
    virtual = flags.virtual if flags.virtual > 1 else None
    schedule = PipelineSchedule(ranks=layout.pipeline, rank=stage, virtual=virtual, group=flags.group)
    return schedule.list_steps(counts.micro_batches)


def count_in_flight(layout: ParallelDims, stage: int, flags: MegatronMemoryFlags, counts: StepCounts) -> int:
    """Count the micro-batches of which a stage's first virtual stage holds activations."""
    return max(step.held[0] for step in list_stage_steps(layout, stage, flags, counts))


def estimate_stage_activations(
    spec: DecoderSpec,
    layout: ParallelDims,
    dtype: str,
    tokens: int,
    config: TrainConfig,
    *,
    stage: int,
    flags: MegatronMemoryFlags,
    counts: StepCounts,
    fused: bool,
    longest: int | None = None,
    numerics: Numerics = FAST,
    lora: LoraSpec | None = None,
) -> int:
    """Bytes of the activations of a pipeline stage at most: what the micro-batches in flight keep, and the peak of the
    one that is in its backward pass, beside the gradients that go from stage to stage.

    A micro-batch has up to ``tokens``. Interleaved stages also run idle ones, to fill a group.
    """
    parts = _list_parts(spec, layout, stage, flags)
    moments = [
        list_rank_moments(
            spec,
            layout,
            dtype,
            tokens,
            config,
            fused=fused,
            longest=longest,
            numerics=numerics,
            lora=lora,
            stage=part,
        )
        for part in parts
    ]
    most = float("inf") if counts.tokens is None or len(parts) > 1 else counts.tokens / tokens
    sent = _count_sent_bytes(spec, layout, dtype, tokens)
    steps = list_stage_steps(layout, stage, flags, counts)
    return max(_sum_step(step, moments, most) + _count_messages(step, parts) * sent for step in steps)


def _list_parts(
    spec: DecoderSpec, layout: ParallelDims, stage: int, flags: MegatronMemoryFlags
) -> tuple[StagePart, ...]:
    """The layers of a stage, of each of its virtual stages."""
    chunks = split_layers(spec.num_layers, layout.pipeline, flags)[stage]
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    return tuple(
        StagePart(layers, first=is_first and number == 0, last=is_last and number == len(chunks) - 1)
        for number, layers in enumerate(chunks)
    )


def _sum_step(step: PipelineStep, moments: list[StepMoments], most: float) -> int:
    """Bytes at a backward pass, of which micro-batches have the tokens of ``most`` full ones in all."""
    kept = sum(
        max(0.0, min(count, most) - (number == step.running)) * moments[number].kept
        for number, count in enumerate(step.held)
    )
    return moments[step.running].peak + ceil(kept)


def _count_messages(step: PipelineStep, parts: tuple[StagePart, ...]) -> int:
    """Gradients of the residual stream that the schedule has beside those of the backward pass: the one it received for
    this pass, and the one it sent after the last.
    """
    return int(not parts[step.running].last) + int(not all(part.first for part in parts))


def _count_sent_bytes(spec: DecoderSpec, layout: ParallelDims, dtype: str, tokens: int) -> int:
    streams = spec.streams if spec.altup is None else spec.altup.streams
    slots = ceil(tokens / (layout.context * (layout.tensor if layout.sequence else 1)))
    return slots * streams * spec.hidden_size * BYTES[dtype]
