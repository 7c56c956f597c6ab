"""Records that experiment trackers receive: the scalars of a step or an evaluation, and a table of samples.

A record is plain data, so that it can wait in a queue without keeping a batch in memory, and cross to another process
as one line of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from miles.core.events import BatchTaken, Evaluated, Event, RunStarted, StepFinished
from miles.core.types import EMPTY, Prompt, Trajectory

SAMPLE_COLUMNS = ("step", "prompt_id", "trajectory", "reward", "status", "response_length", "prompt", "response")
MAX_SAMPLE_CHARS = 4000
"""Longest text of a cell; the middle of a longer one is left out."""
_SECRET_NAME = re.compile(r"(KEY|TOKEN|PASSWORD|SECRET|HEADERS)$")
_MIN_SECRET_CHARS = 6
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRecord:
    """What a tracker is sent: scalars of ``step``, and rows of ``SAMPLE_COLUMNS``.

    With ``is_resume``, the run continues after ``step``: what an earlier process logged beyond it will be repeated.
    """

    step: int
    scalars: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    samples: tuple[tuple[Any, ...], ...] = ()
    is_resume: bool = False


_FIELDS = tuple(field.name for field in fields(TrackerRecord))


def encode_record(record: TrackerRecord) -> str:
    """Encode a record as one line of JSON."""
    return json.dumps({name: getattr(record, name) for name in _FIELDS} | {"scalars": dict(record.scalars)})


def decode_record(line: str) -> TrackerRecord:
    """Return the record of a line."""
    values = json.loads(line)
    return TrackerRecord(**values | {"samples": tuple(map(tuple, values["samples"]))})


class RecordBuilder:
    """Builds records from events; every ``interval`` steps with ``max_samples`` of the step's trajectories."""

    def __init__(self, *, max_samples: int = 0, interval: int = 1) -> None:
        self._max_samples = max_samples
        self._interval = interval
        self._samples: tuple[tuple[Any, ...], ...] = ()

    def __call__(self, event: Event) -> TrackerRecord | None:
        match event:
            case RunStarted() if event.step:
                return TrackerRecord(step=event.step, is_resume=True)
            case BatchTaken() if self._max_samples and event.step % self._interval == 0:
                self._samples = build_sample_rows(event, self._max_samples)
            case StepFinished():
                samples, self._samples = self._samples, ()
                return TrackerRecord(step=event.step, scalars=scalars_from_event(event), samples=samples)
            case Evaluated():
                return TrackerRecord(step=event.step, scalars=scalars_from_event(event))
            case _:
                pass
        return None


def scalars_from_event(event: StepFinished | Evaluated) -> dict[str, float]:
    """Metrics and seconds of a step or an evaluation, by names with a section."""
    section = "train" if isinstance(event, StepFinished) else "eval"
    drafts = {name: value for name, value in event.seconds.items() if name.startswith("speculative/")}
    seconds = {name: value for name, value in event.seconds.items() if name not in drafts}
    return _add_section(event.metrics, section) | _add_section(seconds, "seconds") | _add_section(drafts, "speculative")


def _add_section(values: Mapping[str, float], section: str) -> dict[str, float]:
    """Prefix names with the section, by which charts are grouped."""
    return {
        name if name.startswith(f"{section}/") else f"{section}/{name}": float(value) for name, value in values.items()
    }


def build_sample_rows(taken: BatchTaken, count: int) -> tuple[tuple[Any, ...], ...]:
    """Return rows for ``count`` trajectories of a batch, evenly spaced over it."""
    pairs = [(group.prompt, trajectory) for group in taken.groups for trajectory in group.trajectories]
    count = min(count, len(pairs))
    chosen = [pairs[index * len(pairs) // count] for index in range(count)]
    return tuple(_build_row(taken.step, prompt, trajectory) for prompt, trajectory in chosen)


def _build_row(step: int, prompt: Prompt, trajectory: Trajectory) -> tuple[Any, ...]:
    reward = None if trajectory.reward is None else float(trajectory.reward.value)
    response = trajectory.metadata.get("text")
    return (
        step,
        prompt.id,
        trajectory.index,
        reward,
        str(trajectory.status),
        trajectory.response_length,
        _shorten(format_messages(prompt.messages)),
        _shorten(response if isinstance(response, str) else ""),
    )


def format_messages(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of chat messages, one paragraph each; a part that is not text is named by its type.

    >>> format_messages([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}])
    'user: [image] What is it?'
    """
    return "\n\n".join(f"{message.get('role', '')}: {_format_content(message.get('content'))}" for message in messages)


def _format_content(content: Any) -> str:
    if not isinstance(content, list | tuple):
        return str(content or "")
    parts = (part if isinstance(part, Mapping) else {"type": "text", "text": str(part)} for part in content)
    return " ".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _shorten(text: str) -> str:
    if len(text) <= MAX_SAMPLE_CHARS:
        return text
    half = MAX_SAMPLE_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def hide_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return a text without the credentials of URLs and without the values of secret environment variables.

    >>> hide_secrets("https://me:pw@host/x refused k123456", {"WANDB_API_KEY": "k123456"})
    'https://***@host/x refused ***'
    """
    text = _URL_CREDENTIALS.sub(HIDDEN, text)
    for name, value in environment.items():
        if len(value) >= _MIN_SECRET_CHARS and _SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    return text
