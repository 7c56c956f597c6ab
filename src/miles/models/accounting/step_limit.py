"""Roofline of a training step: the least time that each part of it takes on devices of known peaks. No torch.

A part computes FLOPs, reads and writes memory, and receives bytes from other devices; it cannot take less time than the
slowest of the three. Parts:

    rollout/prefill         prompts and what environments insert, once for each group: matmuls
    rollout/decode          weights and KV cache, read at each step of a batch that shrinks as responses end
    train/old_logprobs      a forward pass before the updates, where the ratio needs one
    train/values            a forward pass of the critic
    train/reference         a forward pass of each frozen model: the reference, teachers
    train/forward_backward  forward and backward passes, and what the backward pass computes again
    train/critic            the same of the critic
    train/optimizer         gradients, moments and weights, read and written at each update
    publish/weights         the weights, copied or received by the engines
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal

from miles.kernels.numerics import Numerics
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout
from miles.models.accounting.params import (
    BYTES,
    active_parameter_count,
    forward_flops_per_token,
    ngram_table_size,
    packed_weight_bytes,
    parameter_count,
    state_bytes_per_sequence,
    vision_parameter_count,
    weight_bytes,
)
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, PoolIndexerSpec, RelativeAttentionSpec

Bound = Literal["compute", "memory", "link"]
_Counted = AttentionSpec | MlaSpec | RelativeAttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWorkload:
    """Tokens of a step: of each group's prompt, and what the policy sampled in each trajectory of each group.

    ``inserted`` are tokens that environments wrote, in all trajectories together; ``sequences`` the tokens of each
    training sample; ``shared`` input tokens of training that prefix sharing saves.
    """

    prompts: tuple[int, ...] = ()
    responses: tuple[tuple[int, ...], ...] = ()
    inserted: int = 0
    sequences: tuple[int, ...] = ()
    shared: float = 0.0

    @staticmethod
    def repeat(*, prompts: int, samples: int, prompt: int, response: int) -> StepWorkload:
        """``samples`` responses to each of ``prompts`` prompts, all of one length."""
        return StepWorkload(
            prompts=(prompt,) * prompts,
            responses=((response,) * samples,) * prompts,
            sequences=(prompt + response,) * (prompts * samples),
        )

    @property
    def train_tokens(self) -> float:
        """Input tokens of a forward pass in training."""
        return sum(self.sequences) - self.shared

    @property
    def train_context(self) -> float:
        """Mean number of earlier tokens of a token in training."""
        return sum(n * n for n in self.sequences) / (2 * sum(self.sequences)) if any(self.sequences) else 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, bytes of memory and bytes from other devices, per device, that can overlap each other."""

    flops: float = 0.0
    bytes: float = 0.0
    link_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """The work of one part; pieces follow each other. ``inside`` is the measured time that it is part of.

    ``unknown`` says why nothing bounds it: its bytes take a way whose bandwidth is not known.
    """

    name: str
    inside: str
    pieces: tuple[Work, ...] = ()
    unknown: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimit:
    """The least seconds of a part, by what bounds its pieces; ``why`` where no limit is known."""

    name: str
    inside: str
    seconds: float | None
    by_bound: Mapping[Bound, float]
    flops: float
    bytes: float
    link_bytes: float
    why: str = ""

    @property
    def main_bound(self) -> Bound | None:
        """What bounds most of it; None where nothing does."""
        return max(self.by_bound, key=lambda name: self.by_bound[name]) if self.by_bound else None


@dataclass(frozen=True, kw_only=True)
class EngineSide:
    """The rollout plane: ``engines`` of ``devices_each`` devices, with at most ``max_running`` requests each.

    ``spec`` has the quantization of the engine's weights.
    """

    spec: DecoderSpec
    dtype: str
    numerics: Numerics
    engines: int = 1
    devices_each: int = 1
    max_running: int | None = None

    def prefill(self, workload: StepWorkload) -> Work:
        """Work per device of prompts, each computed once; only the last position of one needs logits."""
        tokens = sum(workload.prompts) + workload.inserted
        if not tokens:
            return Work()
        context = sum(n * n for n in workload.prompts) / (2 * tokens)
        logits = 2.0 * self.spec.vocab_size * self.spec.hidden_size
        flops = tokens * (forward_flops_per_token(self.spec, context) - logits) + len(workload.prompts) * logits
        return Work(flops / (self.engines * self.devices_each), self._weights / self.devices_each)

    def decode(self, workload: StepWorkload, tokens_per_step: float = 1.0) -> Iterator[Work]:
        """Yield the work per device between two ends of responses, of a batch spread evenly over the engines.

        A step reads the weights, of experts those that its rows select, the KV cache of each running response, and that
        of a prompt once for its group. ``tokens_per_step`` is what verifying drafts accepts on average.
        """
        sampled = sum(map(sum, workload.responses))
        growth = 1 + workload.inserted / sampled if sampled else 1.0
        capacity = inf if self.max_running is None else self.max_running * self.engines
        carried = 0.0
        for segment in _list_segments(workload):
            tokens = segment.rows * segment.steps + carried
            done = min(tokens, capacity * segment.steps)
            carried = tokens - done
            rows = done / segment.steps
            context = segment.middle * growth + segment.prompt_tokens / segment.rows
            yield self._decode_steps(segment.steps, rows, context, tokens_per_step)
        if carried:  # more responses than may run at once, after the longest could have ended
            lengths = [length for group in workload.responses for length in group]
            context = (sum(lengths) / len(lengths) / 2) * growth
            yield self._decode_steps(carried / capacity, capacity, context, tokens_per_step)

    def _decode_steps(self, steps: float, rows: float, context: float, tokens_per_step: float) -> Work:
        each = rows / self.engines
        verified = steps / tokens_per_step
        read = verified * (self.weight_bytes_per_step(each * tokens_per_step) - self._unread)
        read += steps * each * (self._cache_bytes(context) / tokens_per_step + 2 * self._state_bytes)
        flops = steps * each * forward_flops_per_token(self.spec, context)
        return Work(flops / self.devices_each, read / self.devices_each)

    @cached_property
    def _weights(self) -> float:
        return float(packed_weight_bytes(self.spec, self.dtype))

    @cached_property
    def _unread(self) -> float:
        """Bytes of weights that decoding does not read: embeddings that are no head too, and a vision tower."""
        embedding = 0 if self.spec.tie_embeddings else self.spec.vocab_size * self.spec.hidden_size
        embedding += ngram_table_size(self.spec)
        return float((embedding + vision_parameter_count(self.spec)) * BYTES[self.dtype])

    @cached_property
    def _state_bytes(self) -> float:
        return float(state_bytes_per_sequence(self.spec, self.dtype))

    @cached_property
    def _cache_sizes(self) -> tuple[tuple[float, float], ...]:
        """Bytes per token of the KV cache, with the number of tokens that layers of that size see at most."""
        sizes: dict[float, float] = {}
        for layer in self.spec.layers:
            layout = cache_layout(layer.mixer, self.numerics)
            if isinstance(layout, PerTokenCache):
                # Of compressed attention all is counted: the states of tokens, though only their windows are read.
                seen = _count_visible(layer.mixer) if isinstance(layer.mixer, _Counted) else inf
                size = layout.bytes_per_token(BYTES[self.dtype], self.numerics)
                sizes[seen] = sizes.get(seen, 0.0) + size
        return tuple(sizes.items())

    def _cache_bytes(self, context: float) -> float:
        return sum(min(context, seen) * size for seen, size in self._cache_sizes)

    @cached_property
    def _experts(self) -> tuple[float, float]:
        """Parameters of routed experts, and the share of them that one token uses."""
        moe = self.spec.moe
        share = 0.0 if moe is None else moe.experts_per_token / moe.num_experts
        if not 0 < share < 1:
            return 0.0, 0.0
        idle = parameter_count(self.spec) - active_parameter_count(self.spec) - ngram_table_size(self.spec)
        return idle / (1 - share), share

    def weight_bytes_per_step(self, rows: float) -> float:
        """Return the weight bytes that a step with so many rows reads: few rows need few experts."""
        total = parameter_count(self.spec)
        experts, share = self._experts
        return self._weights * (1 - experts / total * (1 - share) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSide:
    """The training plane on ``devices``, which share tokens and weights evenly.

    ``backward`` is the cost of a backward pass relative to the forward pass, ``recompute`` the share of the layers that
    it computes again. ``frozen`` models make a forward pass each, ``frozen_inside`` the measured time of these.
    ``optimizer_bytes`` are read and written on a device at each of ``updates``, None where states are in host memory.
    """

    spec: DecoderSpec
    dtype: str
    devices: int = 1
    backward: float = 2.0
    recompute: float = 0.0
    old_logprobs: bool = False
    critic: DecoderSpec | None = None
    frozen: tuple[DecoderSpec, ...] = ()
    frozen_inside: str = "train/optimize"
    updates: int = 1
    optimizer_bytes: float | None = 0.0

    def list_parts(self, workload: StepWorkload) -> Iterator[PartWork]:
        """Yield the parts of a training step."""
        if self.old_logprobs:
            yield self._forward("old_logprobs", self.spec, workload, "train/old_logprobs")
        if self.critic is not None:
            yield self._forward("values", self.critic, workload, "train/returns")
        if self.frozen:
            pieces = tuple(self._pass(spec, workload, trained=False) for spec in self.frozen)
            yield PartWork(name="train/reference", inside=self.frozen_inside, pieces=pieces)
        inside = "train/optimize"
        trained = {"forward_backward": self.spec} | ({} if self.critic is None else {"critic": self.critic})
        for name, spec in trained.items():
            piece = self._pass(spec, workload, trained=True)
            yield PartWork(name=f"train/{name}", inside=inside, pieces=(piece,))
        unknown = "its states are in host memory" if self.optimizer_bytes is None else ""
        work = Work(bytes=(self.optimizer_bytes or 0.0) * self.updates)
        yield PartWork(name="train/optimizer", inside=inside, pieces=(work,), unknown=unknown)

    def _forward(self, name: str, spec: DecoderSpec, workload: StepWorkload, inside: str) -> PartWork:
        return PartWork(name=f"train/{name}", inside=inside, pieces=(self._pass(spec, workload, trained=False),))

    def _pass(self, spec: DecoderSpec, workload: StepWorkload, *, trained: bool) -> Work:
        """Return the work per device of a forward pass and, of a model that is trained, of its backward pass."""
        forward = forward_flops_per_token(spec, workload.train_context)
        layers = forward - 2.0 * spec.vocab_size * spec.hidden_size
        flops = forward * (1 + self.backward) + layers * self.recompute if trained else forward
        passes = 1 + self.backward if trained else 1.0
        read = (weight_bytes(spec, self.dtype) - ngram_table_size(spec) * BYTES[self.dtype]) * passes
        return Work(workload.train_tokens * flops / self.devices, read / self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The work of a step by part. ``rollout`` or ``train`` is None where the run has no such plane.

    ``publish`` is the work of a weight update, of an engine's device; ``overlaps`` says that engines generate during
    the whole step, and ``shares_devices`` that they do so on the trainer's devices.
    """

    rollout: EngineSide | None
    train: TrainSide | None
    publish: Work | None = None
    publish_unknown: str = ""
    overlaps: bool = False
    shares_devices: bool = True

    @property
    def concurrent(self) -> bool:
        """Whether both planes compute at the same time, on devices of their own."""
        return self.overlaps and not self.shares_devices

    def list_parts(self, workload: StepWorkload, tokens_per_step: float = 1.0) -> tuple[PartWork, ...]:
        """Return the work of each part of a step."""
        parts: list[PartWork] = []
        if self.rollout is not None:
            prefill = (self.rollout.prefill(workload),)
            decode = tuple(self.rollout.decode(workload, tokens_per_step))
            parts.append(PartWork(name="rollout/prefill", inside="rollout", pieces=prefill))
            parts.append(PartWork(name="rollout/decode", inside="rollout", pieces=decode))
        if self.train is not None:
            parts += self.train.list_parts(workload)
        if self.publish is not None or self.publish_unknown:
            pieces = () if self.publish is None else (self.publish,)
            unknown = self.publish_unknown
            parts.append(PartWork(name="publish/weights", inside="publish", pieces=pieces, unknown=unknown))
        return tuple(parts)

    def sum_limits(self, limits: Sequence[PartLimit]) -> float | None:
        """Return the least seconds of a whole step; None if no part has a limit.

        Concurrent planes take as long as the slower one.
        """
        if all(limit.seconds is None for limit in limits):
            return None
        rollout = sum(limit.seconds or 0.0 for limit in limits if limit.name.startswith("rollout/"))
        rest = sum(limit.seconds or 0.0 for limit in limits if not limit.name.startswith("rollout/"))
        return max(rollout, rest) if self.concurrent else rollout + rest


def limit_part(part: PartWork, *, flops: float | None, bandwidth: float | None, link: float | None) -> PartLimit:
    """Return the least seconds of a part on devices of these peaks, each per second; None where unknown.

    >>> part = PartWork(name="rollout/decode", inside="rollout", pieces=(Work(2.0, 30.0), Work(8.0, 10.0)))
    >>> limit = limit_part(part, flops=1.0, bandwidth=10.0, link=None)
    >>> limit.seconds, limit.by_bound
    (11.0, {'compute': 8.0, 'memory': 3.0})
    """
    peaks: dict[Bound, float | None] = {"compute": flops, "memory": bandwidth, "link": link}
    seconds: dict[Bound, float] = {"compute": 0.0, "memory": 0.0, "link": 0.0}
    why = part.unknown
    for piece in part.pieces:
        work: dict[Bound, float] = {"compute": piece.flops, "memory": piece.bytes, "link": piece.link_bytes}
        missing = [name for name, amount in work.items() if amount and peaks[name] is None]
        if missing:
            why = why or f"the device's peak of {missing[0]} is not known"
            continue
        times: dict[Bound, float] = {name: amount / (peaks[name] or 1.0) for name, amount in work.items()}
        bound = max(times, key=lambda name: times[name])
        seconds[bound] += times[bound]
    return PartLimit(
        name=part.name,
        inside=part.inside,
        seconds=None if why else sum(seconds.values()),
        by_bound={} if why else {name: each for name, each in seconds.items() if each},
        flops=sum(piece.flops for piece in part.pieces),
        bytes=sum(piece.bytes for piece in part.pieces),
        link_bytes=sum(piece.link_bytes for piece in part.pieces),
        why=why,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Steps of decoding between two ends of responses: running rows, and prompt tokens of groups that have any."""

    steps: int
    rows: int
    middle: float
    prompt_tokens: float


def _list_segments(workload: StepWorkload) -> Iterator[_Segment]:
    """Yield the segments of a batch in which all responses start at once."""
    lengths = sorted(length for group in workload.responses for length in group)
    prompts = list(zip(workload.prompts, workload.responses, strict=False))
    groups = sorted((max(group), prompt) for prompt, group in prompts if group)
    rows = len(lengths)
    start = ended = 0
    prompt_tokens = float(sum(prompt for _, prompt in groups))
    for i, length in enumerate(lengths):
        if length > start:
            while ended < len(groups) and groups[ended][0] <= start:
                prompt_tokens -= groups[ended][1]
                ended += 1
            steps, middle = length - start, (start + length - 1) / 2
            yield _Segment(steps=steps, rows=rows - i, middle=middle, prompt_tokens=prompt_tokens)
            start = length


def _count_visible(mixer: _Counted) -> float:
    """Return how many earlier tokens a layer reads at most."""
    if isinstance(mixer, RelativeAttentionSpec):
        return float(mixer.window or inf)
    if isinstance(mixer, AttentionSpec):
        selected: float = inf
        if isinstance(mixer.indexer, PoolIndexerSpec):
            selected = mixer.indexer.top + mixer.indexer.pool - 1
        elif mixer.indexer is not None:
            selected = mixer.indexer.top * mixer.indexer.block
        return float(min(mixer.window or inf, mixer.chunk or inf, selected))
    return inf if mixer.indexer is None else float(mixer.indexer.top)
