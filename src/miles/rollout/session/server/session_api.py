"""The sessions' own endpoints: the body of ``POST /sessions``, and a session and its trajectory as JSON."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field

from miles.core.protocols import SamplingParams
from miles.core.types import Array, Prompt, Span, Status
from miles.rollout.seeds import hash_text, mix
from miles.rollout.serving.body import Count, PositiveInt, RequestBody, parse_body
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.openai_bodies import MessageBody
from miles.rollout.session.match import MATCHERS, MessageMatcher
from miles.rollout.session.server.chat import build_messages
from miles.rollout.session.server.registry import SessionEntry, SessionSettings
from miles.rollout.session.server.sampling import SessionSampling

CUSTOM_MATCH = "own"
"""The name of a matcher that is the run's own function."""


class PromptBody(RequestBody):
    """The ``prompt`` of a session that is opened."""

    model_config = ConfigDict(extra="forbid")
    closed_name: ClassVar[str | None] = "A prompt"
    id: Count = 0
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class SessionBody(RequestBody):
    """``POST /sessions``."""

    model_config = ConfigDict(extra="forbid")
    closed_name: ClassVar[str | None] = "A session"
    id: str | None = None
    prompt: PromptBody | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    visible_metadata: list[str] = Field(default_factory=list)
    sampling: SessionSampling | None = None
    match: str | None = None
    hold: bool | None = None
    max_turns: PositiveInt | None = None
    max_tokens: PositiveInt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionDefaults:
    """What sessions are opened with where a client says nothing; ``match`` is a name or the function itself."""

    sampling: SamplingParams
    match: str | MessageMatcher
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """A session that a client wants to open."""

    id: str
    prompt: Prompt | None
    match: MessageMatcher
    settings: SessionSettings


def resolve_matcher(match: str | MessageMatcher) -> tuple[str, MessageMatcher]:
    """A matcher and its name."""
    if not isinstance(match, str):
        return CUSTOM_MATCH, match
    if match not in MATCHERS:
        raise RequestError(f"match is {match!r}, but must be one of {', '.join(MATCHERS)}.", param="match")
    return match, MATCHERS[match]


def parse_session(value: Any, defaults: SessionDefaults) -> SessionRequest:
    """The body of ``POST /sessions``; an empty one takes the defaults."""
    body = parse_body(SessionBody, {} if value is None else value)
    id = body.id or uuid.uuid4().hex
    if missing := [key for key in body.visible_metadata if key not in body.metadata]:
        raise RequestError(f"visible_metadata has {missing[0]!r}, which metadata does not.", param="visible_metadata")
    name, match = resolve_matcher(defaults.match if body.match in (None, CUSTOM_MATCH) else body.match)
    # A session that sets no seed gets its own, derived from its id.
    sampling = replace(defaults.sampling, seed=mix(defaults.sampling.seed, hash_text(id)) >> 1)
    settings = SessionSettings(
        sampling=sampling if body.sampling is None else body.sampling.apply(sampling),
        hold=defaults.hold if body.hold is None else body.hold,
        match=name,
        metadata=body.metadata,
        visible_metadata=tuple(body.visible_metadata),
        max_turns=body.max_turns,
        max_tokens=body.max_tokens,
    )
    prompt = None
    if body.prompt is not None:
        prompt = Prompt(
            id=body.prompt.id,
            messages=build_messages(body.prompt.messages),
            label=body.prompt.label,
            metadata=body.prompt.metadata,
        )
    return SessionRequest(id=id, prompt=prompt, match=match, settings=settings)


def format_session(entry: SessionEntry, url: str) -> dict[str, Any]:
    """A session and its progress. ``base_url`` is for OpenAI's clients, ``anthropic_base_url`` for Anthropic's.

    The agent can read it, so it holds nothing a grader uses: not the prompt's label, nor its metadata.
    """
    settings, prompt = entry.settings, entry.session.prompt
    return {
        "id": entry.id,
        "object": "session",
        "base_url": f"{url}/v1",
        "anthropic_base_url": url,
        "match": settings.match,
        "hold": settings.hold,
        "sampling": asdict(settings.sampling),
        "metadata": _select_visible(settings),
        "prompt": None if prompt is None else {"id": prompt.id, "messages": list(prompt.messages)},
        "max_turns": settings.max_turns,
        "max_tokens": settings.max_tokens,
        "turns": entry.num_turns,
        "tokens": entry.num_tokens,
        "running": entry.num_running,
        "branches": len(entry.session.tree.leaves()),
        "status": str(entry.status),
        "failure": entry.failure,
        "notes": entry.notes,
    }


def format_trajectory(entry: SessionEntry, *, extras: bool) -> dict[str, Any]:
    """Every branch as spans: author and tokens, and for the policy's the log-probs and the weight version."""
    trajectory = entry.session.trajectory(status=entry.status)
    return {
        "id": entry.id,
        "object": "trajectory",
        "status": str(trajectory.status),
        "metadata": {**_select_visible(entry.settings), **trajectory.metadata},
        "branches": [{"spans": [_format_span(span, extras) for span in branch]} for branch in trajectory.branches],
    }


def _select_visible(settings: SessionSettings) -> dict[str, Any]:
    """The metadata that the session's opener lets its agent see."""
    return {key: settings.metadata[key] for key in settings.visible_metadata}


def is_empty(entry: SessionEntry) -> bool:
    """Whether the session has no conversation at all, not even a prompt."""
    return entry.status is Status.FAILED and not len(entry.session.tree) and entry.session.prompt is None


def _format_span(span: Span, extras: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"author": str(span.author), "tokens": span.tokens.tolist()}
    if span.logprobs is not None and span.version is not None:
        body["logprobs"] = [float(x) for x in span.logprobs]
        body["version"] = {"policy": span.version.policy, "number": span.version.number}
    if extras and span.extras:
        body["extras"] = _format_arrays(span.extras)
    return body


def _format_arrays(extras: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays as base64 with dtype and shape: read with numpy.frombuffer, then reshape."""
    return {
        name: {
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            "base64": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode(),
        }
        for name, values in extras.items()
    }
