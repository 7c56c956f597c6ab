"""The body of ``POST /sessions``, read into the terms of a session."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles.core.protocols import Sampling
from miles.core.types import Prompt
from miles.rollout.seeds import mix, text_number
from miles.rollout.session.match import MATCHES, Match
from miles.rollout.session.server.chat import read_messages
from miles.rollout.session.server.drawing import read_sampling
from miles.rollout.session.server.entry import Terms
from miles.rollout.session.server.fields import Fields
from miles.rollout.session.server.refusal import Refusal

OWN = "own"
"""What a match is called that is a function of the run's and no built-in one."""
_KNOWN = frozenset(("id", "prompt", "metadata", "sampling", "match", "hold", "max_turns", "max_tokens"))
_OF_PROMPT = frozenset(("id", "messages", "label", "metadata"))


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What sessions are opened with where nobody says otherwise; ``match`` by its name, or the function itself."""

    sampling: Sampling
    match: str | Match
    hold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A session somebody wants."""

    id: str
    prompt: Prompt | None
    match: Match
    terms: Terms


def matched(match: str | Match) -> tuple[str, Match]:
    """A match and its name."""
    if not isinstance(match, str):
        return OWN, match
    if match not in MATCHES:
        raise Refusal(f"match is {match!r}, but must be one of {', '.join(MATCHES)}.", param="match")
    return match, MATCHES[match]


def read_opening(body: Any, house: House) -> Opening:
    """What a body wants; an empty one wants what the house has."""
    fields = Fields({} if body is None else body)
    fields.only(_KNOWN, "A session")
    id = fields.text("id") or uuid.uuid4().hex
    metadata = fields.object("metadata")
    given = fields.text("match")
    name, match = matched(house.match if given in (None, OWN) else given)
    terms = Terms(
        sampling=_sampling(fields, house.sampling, id),
        held=fields.flag("hold", house.hold),
        match=name,
        metadata={} if metadata is None else metadata.all(),
        max_turns=fields.maybe_integer("max_turns", low=1),
        max_tokens=fields.maybe_integer("max_tokens", low=1),
    )
    prompt = fields.object("prompt")
    return Opening(id=id, prompt=None if prompt is None else _prompt(prompt), match=match, terms=terms)


def _sampling(fields: Fields, given: Sampling, id: str) -> Sampling:
    """What the body says; sessions that name no seed have each its own, by their ids."""
    own = replace(given, seed=mix(given.seed, text_number(id)) >> 1)
    said = fields.object("sampling")
    return own if said is None else read_sampling(said, own)


def _prompt(fields: Fields) -> Prompt:
    fields.only(_OF_PROMPT, "A prompt")
    metadata: Mapping[str, Any] = {} if (given := fields.object("metadata")) is None else given.all()
    return Prompt(
        id=fields.maybe_integer("id", low=0) or 0,
        messages=read_messages(fields),
        label=fields.text("label"),
        metadata=metadata,
    )
