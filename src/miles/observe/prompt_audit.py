"""Prompt audit: at the end of a run, its event log must account for every prompt, whatever was killed and resumed.

A prompt that is admitted twice in an epoch, trained twice, or skipped by an epoch that has ended would change what is
learned without an error.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import MilesError

_MAX_NAMED = 4


class PromptAuditError(MilesError):
    """Prompts that the event log shows more than once, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """What became of the prompts of a run."""

    admitted: int
    trained: int
    dropped: int
    epochs: int


def audit_prompts(events: Path, *, whole_epochs: bool) -> PromptCounts:
    """Count the prompts of an event log; PromptAuditError if one is repeated or skipped.

    ``whole_epochs``: an epoch passes over every prompt once, so that all epochs that have ended must have the same
    prompts. Sources that mix or choose prompts do not promise it.
    """
    by_epoch: dict[int, set[int]] = defaultdict(set)
    prompt_of: dict[int, tuple[int, int]] = {}
    trained: set[int] = set()
    dropped = 0
    for event in _read_events(events):
        match event.get("event"):
            case "PromptAdmitted":
                ticket, epoch, prompt = event["ticket"], event["epoch"], event["prompt_id"]
                if prompt in by_epoch[epoch] or ticket in prompt_of:
                    raise PromptAuditError(f"prompt {prompt} was admitted twice in epoch {epoch} ({events})")
                by_epoch[epoch].add(prompt)
                prompt_of[ticket] = prompt, epoch
            case "GroupFinished" if not event["kept"]:
                dropped += 1
            case "BatchTaken":
                for ticket in event["tickets"]:
                    if ticket in trained:
                        prompt, epoch = prompt_of.get(ticket, (-1, -1))
                        raise PromptAuditError(f"prompt {prompt} of epoch {epoch} was trained twice ({events})")
                    trained.add(ticket)
            case _:
                pass
    if whole_epochs:
        _check_whole_epochs(by_epoch, events)
    return PromptCounts(admitted=len(prompt_of), trained=len(trained), dropped=dropped, epochs=len(by_epoch))


def _check_whole_epochs(by_epoch: Mapping[int, set[int]], events: Path) -> None:
    """All epochs between the first, which another run may have begun, and the last have the same prompts."""
    ended = sorted(by_epoch)[:-1]
    everything = set().union(*by_epoch.values()) if by_epoch else set()
    for epoch in ended[1:] if ended and ended[0] > 0 else ended:
        if missing := sorted(everything - by_epoch[epoch]):
            named = ", ".join(map(str, missing[:_MAX_NAMED])) + (", ..." if len(missing) > _MAX_NAMED else "")
            raise PromptAuditError(f"epoch {epoch} skipped {len(missing)} prompts ({named}; {events})")


def _read_events(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise PromptAuditError(f"line {number} of {path} is damaged, so its prompts are not audited") from error
