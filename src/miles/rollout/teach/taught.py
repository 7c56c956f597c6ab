"""Attempts with what their teacher says of them: scored as soon as each has ended (see core.protocols.Generate).

    generate -----> attempt --> its teacher, branch by branch --> the same attempt, stamped

``N`` tokens of a branch, ``n`` that are asked about at once, ``k`` of the likeliest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles.core.errors import PlugError, first_cause
from miles.core.extras import TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS, TOP_TOKENS
from miles.core.protocols import Engine, Generate, Sampling
from miles.core.types import Array, Author, Prompt, Span, Trajectory
from miles.rollout.teach.sets import TopSet
from miles.rollout.teach.teacher import Teacher
from miles.rollout.teach.wire import Ids, Said, Wish

MOST_WATCHED = 1 << 16
"""Log-probs of watched tokens in one answer. A server gives all that are watched at every place, so a long attempt is
asked about in several parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """Generates, and has one of ``teachers``, the one ``teacher_of`` names, score what was written.

    The policy's spans then carry the teacher's log-prob of each token (core.extras) and, with ``top``, those of a set
    of tokens; the engine's likeliest tokens, of which the set may be made, are left behind.
    """

    generate: Generate
    teachers: Sequence[Teacher]
    teacher_of: Callable[[Prompt], int]
    top: TopSet | None = None

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        trajectory = await self.generate(prompt, engine, sampling)
        teacher = self.teachers[self.teacher_of(prompt)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._stamped(teacher, branch)) for branch in trajectory.branches]
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        return replace(trajectory, branches=tuple(task.result() for task in running))

    async def _stamped(self, teacher: Teacher, branch: tuple[Span, ...]) -> tuple[Span, ...]:
        ends = np.cumsum([len(span) for span in branch])
        own = [at for at, span in enumerate(branch) if span.author is Author.POLICY and len(span)]
        if not own or own[0] == 0:  # a token without context is never trained on
            return branch
        runs = [slice(int(ends[at]) - len(branch[at]), int(ends[at])) for at in own]
        tokens = np.concatenate([span.tokens for span in branch])[: runs[-1].stop]
        extras = await self._extras(teacher, tokens, runs, self._tops(branch, len(tokens)))
        stamped = list(branch)
        for at, run in zip(own, runs, strict=True):
            stamped[at] = _with(branch[at], {name: values[run] for name, values in extras.items()})
        return tuple(stamped)

    async def _extras(
        self, teacher: Teacher, tokens: Ids, runs: Sequence[slice], top_Nk: Ids | None
    ) -> dict[str, Array]:
        """Arrays with an entry a token, filled where the policy wrote; ``runs`` are where that is."""
        parts = list(self._parts(runs, top_Nk))
        wishes = [self._wish(tokens, part, top_Nk) for part in parts]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(teacher.score(wish)) for wish in wishes]
        answers = [task.result() for task in asked]
        found = [{TEACHER_LOGPROB: said.logprob_n} for said in answers]
        if self.top is not None:
            made = [
                self._set(self.top, *rest) for rest in zip(answers, wishes, parts, [top_Nk] * len(parts), strict=True)
            ]
            for one, (ids, values) in zip(found, made, strict=True):
                one |= {TEACHER_TOKENS: ids, TEACHER_LOGPROBS: values}
        extras: dict[str, Array] = {}
        for name, pattern in found[0].items():
            extras[name] = np.zeros((len(tokens), *pattern.shape[1:]), pattern.dtype)
            for part, one in zip(parts, found, strict=True):
                extras[name][part] = one[name]
        return extras

    def _parts(self, runs: Sequence[slice], top_Nk: Ids | None) -> Iterator[slice]:
        """What is asked about at once: everything, or no more than a server should watch."""
        if self.top is None or not self.top.watches:
            yield slice(runs[0].start, runs[-1].stop)
            return
        assert top_Nk is not None
        for run in runs:
            first, seen = run.start, frozenset[int]()
            for at in range(run.start, run.stop):
                more = seen | _some(top_Nk[at])
                if at > first and len(more) * (at + 1 - first) > MOST_WATCHED:
                    yield slice(first, at)
                    first, more = at, _some(top_Nk[at])
                seen = more
            yield slice(first, run.stop)

    def _wish(self, tokens: Ids, part: slice, top_Nk: Ids | None) -> Wish:
        top, watch = self.top, ()
        if top is not None and top.watches:
            assert top_Nk is not None
            watch = tuple(sorted(_some(top_Nk[part])))
        tops = top.k if top is not None and top.asks_teacher else 0
        return Wish(tokens=tuple(tokens[: part.stop].tolist()), start=part.start, tops=tops, watch=watch)

    def _set(self, top: TopSet, said: Said, wish: Wish, part: slice, top_Nk: Ids | None) -> tuple[Ids, Array]:
        own_nk, watched_nk = (None if top_Nk is None else top_Nk[part]), None
        if top.watches:
            assert own_nk is not None
            at_nk = np.searchsorted(np.array(wish.watch, np.int32), np.maximum(own_nk, wish.watch[0]))
            watched_nk = np.take_along_axis(said.watched_nu, at_nk, 1)
        if not top.asks_teacher:
            return top.made(own_nk, None, None, watched_nk)
        return top.made(own_nk, said.top_nk, said.top_logprob_nk, watched_nk)

    def _tops(self, branch: tuple[Span, ...], count: int) -> Ids | None:
        """The policy's likeliest tokens at every place, -1 where it wrote nothing."""
        if self.top is None or not self.top.asks_student:
            return None
        rows: list[Ids] = []
        for span in branch:
            if span.author is not Author.POLICY:
                rows.append(np.full((len(span), self.top.k), -1, np.int32))
            elif TOP_TOKENS in span.extras:
                rows.append(span.extras[TOP_TOKENS])
            else:
                raise PlugError(
                    f"--opd-top-k-strategy {self.top.strategy} needs the tokens the engine found likeliest, and a span "
                    "has none; a generate function of your own must give the engine's spans on as they are."
                )
        return np.concatenate(rows)[:count]


def _some(ids: Ids) -> frozenset[int]:
    return frozenset(token for token in ids.ravel().tolist() if token >= 0)


def _with(span: Span, extras: dict[str, Array]) -> Span:
    kept = {name: values for name, values in span.extras.items() if name != TOP_TOKENS}
    return replace(span, extras={**kept, **extras})
