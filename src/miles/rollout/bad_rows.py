"""Rows that cannot be trained on: a rollout drops the group of such a prompt, or ends the run with advice."""

from __future__ import annotations

from collections.abc import Callable

from miles.core.errors import DataError
from miles.core.protocols import Filter, FilterResult, Rollout
from miles.core.types import Group, Prompt
from miles.rollout.data.dataset import advise_skipping

BAD_ROW = FilterResult(keep=False, reason="bad_row")
"""Why the empty group of a bad row is dropped."""


class BadRowRollout:
    """A core.protocols.Rollout that returns an empty group for a prompt whose data is at fault, with ``skip``.

    The ticket is consumed as usual, so the order and the ids of other prompts do not depend on ``skip``. The first such
    prompt is reported.
    """

    def __init__(self, rollout: Rollout, *, skip: bool, report: Callable[[str], None]) -> None:
        self._rollout = rollout
        self._skip = skip
        self._report = report
        self._is_reported = False

    async def produce(self, prompt: Prompt) -> Group:
        try:
            return await self._rollout.produce(prompt)
        except DataError as error:
            if not self._skip:
                raise DataError(advise_skipping(error)) from error
            if not self._is_reported:
                self._is_reported = True
                self._report(f"A row that cannot be used was dropped (--skip-bad-rows): {error}")
            return Group(prompt=prompt, trajectories=())


def drop_empty_groups(group_filter: Filter) -> Filter:
    """The filter, which also drops the empty groups of bad rows."""

    def keep(group: Group) -> FilterResult:
        return group_filter(group) if group.trajectories else BAD_ROW

    return keep
