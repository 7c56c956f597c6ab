"""Generate wrapper for distillation: each trajectory is scored by its teacher as soon as it ends.

    generate -----> trajectory --> its teacher, branch by branch --> the same trajectory with teacher log-probs

``N`` tokens of a branch, ``n`` of one request, ``k`` of the most likely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles.core.errors import EngineError, HookError, first_cause
from miles.core.protocols import Engine, Generate, SamplingParams
from miles.core.token_fields import TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS, TOP_TOKENS
from miles.core.types import Array, Author, Prompt, Span, Trajectory
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.distill.wire import Ids, ScoreRequest, TokenScores

MAX_QUERIED_LOGPROBS = 1 << 16
"""Queried log-probs in one response. A server returns every queried token at every position, so a long trajectory is
scored in several requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScoredGenerate:
    """Generates, and has the teacher that ``select_teacher`` returns score the trajectory.

    The policy's spans then carry the teacher's log-prob of each token (core.token_fields) and, with ``top``, those of a
    set of tokens; the engine's top tokens, from which the set may be made, are dropped.
    """

    generate: Generate
    teachers: Sequence[TeacherClient]
    select_teacher: Callable[[Prompt], int]
    top: TopKSet | None = None

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        trajectory = await self.generate(prompt, engine, sampling)
        teacher = self.teachers[self.select_teacher(prompt)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._score_branch(teacher, branch)) for branch in trajectory.branches]
        except BaseExceptionGroup as group:
            first = first_cause(group)
            raise first from first.__cause__
        return replace(trajectory, branches=tuple(task.result() for task in running))

    async def _score_branch(self, teacher: TeacherClient, branch: tuple[Span, ...]) -> tuple[Span, ...]:
        ends = np.cumsum([len(span) for span in branch])
        sampled = [at for at, span in enumerate(branch) if span.author is Author.POLICY and len(span)]
        if not sampled or sampled[0] == 0:  # a token without context is never trained on
            return branch
        if any(span.images for span in branch):
            raise EngineError(
                f"the teacher {teacher.name} at {teacher.url} cannot score a trajectory with images, since a teacher's "
                "server is sent tokens only; hold the teacher in the trainer with --opd-teacher-load."
            )
        runs = [slice(int(ends[at]) - len(branch[at]), int(ends[at])) for at in sampled]
        tokens = np.concatenate([span.tokens for span in branch])[: runs[-1].stop]
        extras = await self._fetch_extras(teacher, tokens, runs, self._student_top_tokens(branch, len(tokens)))
        scored = list(branch)
        for at, run in zip(sampled, runs, strict=True):
            scored[at] = _replace_extras(branch[at], {name: values[run] for name, values in extras.items()})
        return tuple(scored)

    async def _fetch_extras(
        self, teacher: TeacherClient, tokens: Ids, runs: Sequence[slice], top_Nk: Ids | None
    ) -> dict[str, Array]:
        """Arrays with one entry per token, filled where the policy wrote; ``runs`` are those ranges."""
        ranges = list(self._split_ranges(runs, top_Nk))
        requests = [self._build_request(tokens, span, top_Nk) for span in ranges]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(teacher.score(request)) for request in requests]
        found: list[dict[str, Array]] = []
        for task, request, span in zip(running, requests, ranges, strict=True):
            scores = task.result()
            arrays: dict[str, Array] = {TEACHER_LOGPROB: scores.logprob_n}
            if self.top is not None:
                ids, values = self._build_set(self.top, scores, request, span, top_Nk)
                arrays |= {TEACHER_TOKENS: ids, TEACHER_LOGPROBS: values}
            found.append(arrays)
        extras: dict[str, Array] = {}
        for name, pattern in found[0].items():
            extras[name] = np.zeros((len(tokens), *pattern.shape[1:]), pattern.dtype)
            for span, arrays in zip(ranges, found, strict=True):
                extras[name][span] = arrays[name]
        return extras

    def _split_ranges(self, runs: Sequence[slice], top_Nk: Ids | None) -> Iterator[slice]:
        """Split the ranges into requests that each query no more tokens than a server should return."""
        if self.top is None or not self.top.scores_student_tokens:
            yield slice(runs[0].start, runs[-1].stop)
            return
        assert top_Nk is not None
        for run in runs:
            first, seen = run.start, frozenset[int]()
            for at in range(run.start, run.stop):
                more = seen | _valid_ids(top_Nk[at])
                if at > first and len(more) * (at + 1 - first) > MAX_QUERIED_LOGPROBS:
                    yield slice(first, at)
                    first, more = at, _valid_ids(top_Nk[at])
                seen = more
            yield slice(first, run.stop)

    def _build_request(self, tokens: Ids, span: slice, top_Nk: Ids | None) -> ScoreRequest:
        top, query_ids = self.top, ()
        if top is not None and top.scores_student_tokens:
            assert top_Nk is not None
            query_ids = tuple(sorted(_valid_ids(top_Nk[span])))
        return ScoreRequest(
            tokens=tuple(tokens[: span.stop].tolist()),
            start=span.start,
            top_k=top.k if top is not None and top.needs_teacher_top_k else 0,
            query_ids=query_ids,
        )

    def _build_set(
        self, top: TopKSet, scores: TokenScores, request: ScoreRequest, span: slice, top_Nk: Ids | None
    ) -> tuple[Ids, Array]:
        student_nk, student_logprob_nk = (None if top_Nk is None else top_Nk[span]), None
        if top.scores_student_tokens:
            assert student_nk is not None
            queried = np.array(request.query_ids, np.int32)
            at_nk = np.searchsorted(queried, np.maximum(student_nk, request.query_ids[0]))
            student_logprob_nk = np.take_along_axis(scores.queried_nu, at_nk, 1)
        if not top.needs_teacher_top_k:
            return top.build(student_nk, None, None, student_logprob_nk)
        return top.build(student_nk, scores.top_nk, scores.top_logprob_nk, student_logprob_nk)

    def _student_top_tokens(self, branch: tuple[Span, ...], count: int) -> Ids | None:
        """The policy's top tokens at every position, -1 where it wrote nothing."""
        if self.top is None or not self.top.needs_student_top_k:
            return None
        rows: list[Ids] = []
        for span in branch:
            if span.author is not Author.POLICY:
                rows.append(np.full((len(span), self.top.k), -1, np.int32))
            elif TOP_TOKENS in span.extras:
                rows.append(span.extras[TOP_TOKENS])
            else:
                raise HookError(
                    f"--opd-top-k-strategy {self.top.strategy} needs the engine's top tokens, and a span has none; a "
                    "custom generate function must return the engine's spans as they are."
                )
        return np.concatenate(rows)[:count]


def _valid_ids(ids: Ids) -> frozenset[int]:
    return frozenset(token for token in ids.ravel().tolist() if token >= 0)


def _replace_extras(span: Span, extras: dict[str, Array]) -> Span:
    kept = {name: values for name, values in span.extras.items() if name != TOP_TOKENS}
    return replace(span, extras={**kept, **extras})
