"""Megatron's pipeline schedules: how many micro-batches' activations a rank holds at each backward pass. No torch.

Rank s of P makes P - s - 1 forward passes before its first backward pass, then one of each in turn (1F1B)::

    P = 2   rank 0   F0 F1 B0 F2 B1 F3 B2 B3
            rank 1      F0 B0 F1 B1 F2 B2 F3 B3

If it has V virtual stages, these take turns after ``group`` micro-batches each, forward from the first, backward from
the last; 2 (P - s - 1) + (V - 1) group forward passes of one virtual stage come before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class PipelineStep(NamedTuple):
    """A backward pass: of virtual stage ``running``, while a rank holds activations of ``held[v]`` micro-batches of
    virtual stage ``v``, of the running one too.
    """

    held: tuple[int, ...]
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The schedule of ``rank`` among ``ranks``; ``virtual`` is None where stages are not interleaved.

    >>> PipelineSchedule(ranks=4, rank=1).list_steps(8)
    [PipelineStep(held=(3,), running=0), PipelineStep(held=(2,), running=0), PipelineStep(held=(1,), running=0)]
    """

    ranks: int
    rank: int
    virtual: int | None = None
    group: int | None = None

    def list_steps(self, micro_batches: int | None = None) -> list[PipelineStep]:
        """List the different backward passes of so many micro-batches; None: of any number."""
        return list(dict.fromkeys(self._run(self._limit_count(micro_batches))))

    def _limit_count(self, micro_batches: int | None) -> int:
        """Return the number of micro-batches that are run, or fewer that hold as many: groups repeat themselves."""
        each = self._group
        enough = each * (-(-self._count_first() // each) + 2)
        if micro_batches is None:
            return enough
        if self.virtual is not None:  # Miles adds idle ones
            micro_batches = -(-micro_batches // self.ranks) * self.ranks
        return micro_batches if micro_batches <= enough else enough + (micro_batches - enough) % each

    @property
    def _group(self) -> int:
        return self.group or self.ranks

    def _count_first(self) -> int:
        """Return the number of forward passes before the first backward pass."""
        after = self.ranks - self.rank - 1
        return after if self.virtual is None else 2 * after + (self.virtual - 1) * self._group

    def _run(self, micro_batches: int) -> Iterator[PipelineStep]:
        count = self.virtual or 1
        order = [
            stage
            for start in range(0, micro_batches, self._group)
            for stage in range(count)
            for _ in range(start, min(start + self._group, micro_batches))
        ]
        held, first = [0] * count, self._count_first()
        for number in range(len(order) + first):
            if number < len(order):
                held[order[number]] += 1
            if first <= number:
                running = count - 1 - order[number - first]
                yield PipelineStep(tuple(held), running)
                held[running] -= 1
