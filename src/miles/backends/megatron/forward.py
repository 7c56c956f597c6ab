"""Micro-batches through Megatron's pipeline schedules: what each stage computes, and what the last one makes of it.

Every stage runs its layers; the last hands hidden states to the judge and differentiates what that calls a loss. What
it keeps goes to all stages at the end. Shapes: ``t`` slots of this rank, ``D`` features, ``n`` micro-batches.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch import distributed as dist

from miles.backends.megatron.layout import Ring, Rings
from miles.backends.megatron.modules import Trunk
from miles.backends.megatron.packed import Batch, Replay, batch_of
from miles.backends.megatron.shape import Shape
from miles.core.errors import UsageError
from miles.models.shard import Part
from miles.train.logits import Output
from miles.train.roles import Judge, Kept
from miles.train.rows import Rows
from miles.train.stopwatch import Stopwatch

_Step = tuple[int | None, Batch]
"""A micro-batch and its number in the plan; None for one that only fills up a schedule."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """``train.logits.Vocabulary``: this tensor rank's rows of the head."""

    first: int
    size: int
    ring: Ring

    def sum(self, x: Tensor) -> Tensor:
        return self.ring.sum(x)

    def most(self, x: Tensor) -> Tensor:
        return self.ring.most(x)


def run(
    chunks: Sequence[Trunk],
    shape: Shape,
    rings: Rings,
    plan: Sequence[Rows],
    judge: Judge,
    *,
    trained: bool,
    watch: Stopwatch | None = None,
) -> list[Kept]:
    """What the judge keeps of every micro-batch, in order; gradients are added up where grad mode permits.

    ``watch`` runs while this rank's stage is read forward.
    """
    if not plan:
        return []
    _refuse(shape, plan)
    learns = trained and torch.is_grad_enabled()
    how: dict[str, Any] = {"sequence": shape.sequence_parallel, "dtype": shape.params_dtype}
    how["counted"] = learns and _deaf(shape) is None
    batches = [batch_of(rows, shape.decoder, rings, **how) for rows in plan]
    steps: list[_Step] = list(enumerate(batches))
    if shape.virtual_pipeline_model_parallel_size is not None:
        # Interleaved stages take micro-batches by the number of stages.
        steps += [(None, batches[-1])] * (-len(steps) % rings.pipeline.world)
    stage = _Stage(shape, rings, judge, learns=learns)
    for chunk in chunks:
        chunk.train(learns)
    with torch.set_grad_enabled(learns):
        found = get_forward_backward_func()(
            forward_step_func=stage.forward if watch is None else watch.around(stage.forward),
            data_iterator=[iter(steps) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(steps),
            seq_length=1,  # the shapes travel with the tensors
            micro_batch_size=1,
            forward_only=not learns,
        )
    stage.count([batch.packed.replay for batch in batches])
    kept = [told for number, told in found if number is not None]
    return _to_all(kept, rings.pipeline, shape.home)


def _refuse(shape: Shape, plan: Sequence[Rows]) -> None:
    """A replay must reach every router that is asked, also one that runs again in backward."""
    told, wrong = any(rows.replay_TLk is not None for rows in plan), _deaf(shape)
    if wrong is not None and (told or any(rows.used is not None for rows in plan)):
        flag = "--use-rollout-routing-replay" if told else "--use-routing-replay"
        raise UsageError(f"{flag} does not go with --megatron-{wrong}: leave one of them out.")


def _deaf(shape: Shape) -> str | None:
    """What keeps routers from being told anything, if something does."""
    again = shape.recompute_granularity == "selective" and "moe" in (shape.recompute_modules or ())
    return "moe-router-fusion" if shape.moe_router_fusion else "recompute-modules moe" if again else None


class _Stage:
    """One stage's part in a run over a plan."""

    def __init__(self, shape: Shape, rings: Rings, judge: Judge, *, learns: bool) -> None:
        self._shape, self._rings, self._judge, self._learns = shape, rings, judge, learns
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        self._loads: dict[int, Tensor] = {}
        rows, rank = Part(shape.decoder.vocab_size), rings.tensor.rank
        first, last = rows.bounds(rank, rings.tensor.world)
        self._vocabulary = _Vocabulary(first, last - first, rings.tensor) if rings.tensor.world > 1 else None

    def forward(self, steps: Iterator[_Step], model: Trunk) -> tuple[Tensor, Any]:
        """A stage's layers, and how its output becomes a loss where the stage is the last."""
        number, batch = next(steps)
        out_t1D = model(batch.tokens_1t, None, None, packed_seq_params=batch.packed)
        return out_t1D, partial(self._loss, model, number, batch)

    def _loss(
        self, model: Trunk, number: int | None, batch: Batch, out_t1D: Tensor
    ) -> tuple[Tensor, Tensor, tuple[int | None, Kept]]:
        if self._shape.sequence_parallel:
            out_t1D = gather_from_sequence_parallel_region(out_t1D, tensor_parallel_output_grad=False)
        hidden_tD = out_t1D.squeeze(1)
        loss, kept = None, {}
        if number is not None:
            loss, kept = self._judge(number, self._output(model, number, batch, hidden_tD))
        if loss is None:
            loss = hidden_tD[:0].sum()
        elif self._learns and not loss.requires_grad:
            loss = loss + hidden_tD[:0].sum()
        return loss, torch.zeros((), dtype=torch.int), (number, kept)

    def _output(self, model: Trunk, number: int, batch: Batch, hidden_tD: Tensor) -> Output:
        flips = replayed = load_LE = None
        replay = batch.packed.replay
        # Other stages have yet to tell theirs: ``count`` fills these in.
        if replay is not None and replay.told_tLk is not None:
            flips, replayed = torch.zeros(2, dtype=torch.int64, device=hidden_tD.device).unbind()
            self._counts[number] = (flips, replayed)
        if replay is not None and self._learns:
            load_LE = self._loads[number] = torch.zeros_like(replay.load())
        return Output(
            hidden_RD=hidden_tD.index_select(0, batch.at_r),
            head_VD=model.head(),
            softcap=self._shape.decoder.logit_softcap,
            vocabulary=self._vocabulary,
            tokens=batch.tokens,
            flips=flips,
            replayed=replayed,
            load_LE=load_LE,
        )

    def count(self, replays: Sequence[Replay | None]) -> None:
        """Give the judge's outputs the flips of all stages and of all ranks that share the tokens, and the loads."""
        told = [replay for replay in replays if replay is not None]
        if not told:
            return
        for replay in told:
            replay.remember()
        numbers = [number for number, replay in enumerate(replays) if replay is not None]
        total_n2 = self._joined(torch.stack([replay.total() for replay in told]))
        for number, whole in zip(numbers, total_n2.unbind(), strict=True):
            for mine, sum_ in zip(self._counts.get(number, ()), whole.unbind(), strict=False):
                mine.copy_(sum_)
        if self._learns:
            load_nLE = self._joined(torch.stack([replay.load() for replay in told]))
            for number, load_LE in zip(numbers, load_nLE.unbind(), strict=True):
                if number in self._loads:
                    self._loads[number].copy_(load_LE)

    def _joined(self, x: Tensor) -> Tensor:
        """The sum over the stages and over all ranks that share the tokens."""
        x = self._rings.context.sum(self._rings.pipeline.sum(x))
        return self._rings.tensor.sum(x) if self._shape.sequence_parallel else x


# -- from the last stage to all -------------------------------------------------------------


def _to_all(kept: list[Kept], ring: Ring, device: torch.device) -> list[Kept]:
    """The last pipeline rank's, on every one, as one message."""
    if ring.world == 1:
        return kept
    last = ring.world - 1
    table: list[Any] = [None]
    if ring.rank == last:
        table = [[{name: (t.dtype, tuple(t.shape)) for name, t in each.items()} for each in kept]]
    dist.broadcast_object_list(table, group=ring.group, group_src=last)
    parts = [(dtype, size) for each in table[0] for dtype, size in each.values()]
    sizes = [torch.Size(size).numel() * dtype.itemsize for dtype, size in parts]
    blob = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if ring.rank == last and sizes:
        tensors = [t for each in kept for t in each.values()]
        blob = torch.cat([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    ring.from_rank(blob, last)
    cut = iter(zip(blob.split(sizes), parts, strict=True))
    out: list[Kept] = []
    for each in table[0]:
        taken = {name: next(cut) for name in each}
        # A clone begins where its type may begin.
        out.append({name: raw.clone().view(dtype).view(size) for name, (raw, (dtype, size)) in taken.items()})
    return out
