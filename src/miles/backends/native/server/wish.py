"""The nouns of a request: how tokens are drawn (``Draw``) and one answer that is wanted (``Wish``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from miles.core.protocols import Sampling

RuleKind = Literal["json_schema", "regex", "ebnf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the text of an answer must match."""

    kind: RuleKind
    source: str


def _no_bias() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How the tokens of an answer are drawn, when it ends, and how its text is written.

    ``limit`` None is all the room the context leaves; it stands in for ``sampling.max_new_tokens``. ``seed`` None is a
    fresh one for each answer. ``trim``: what ended the answer is not part of its text.
    """

    sampling: Sampling
    limit: int | None = 128
    seed: int | None = None
    n: int = 1
    stop_regex: tuple[str, ...] = ()
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=_no_bias)
    rule: Rule | None = None
    skip_special: bool = True
    trim: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a request stands in a session: ``behind`` the request of that name, or None at its beginning.

    ``offset``: behind so many of that one's tokens (below 0, counted from their end); ``drop_output``: without what
    that one answered; ``replace``: in place of all that went on from there.
    """

    session: str
    behind: str | None = None
    offset: int = 0
    replace: bool = False
    drop_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One answer that is wanted: to which prompt, drawn how, and what is to be told of it beside its tokens.

    ``attempt`` counts the answers wanted to the same prompt. ``scores_from`` is the first prompt token whose log-prob
    is told (None: none of them); ``tops`` and ``watch`` ask for other tokens' log-probs beside each.
    ``experts_from``: the routing of the tokens from that position on is told. ``tell_versions``: which weights drew
    which of the tokens is told.
    """

    prompt: str | tuple[int, ...]
    draw: Draw
    rid: str
    attempt: int = 0
    priority: int = 0
    logprobs: bool = False
    scores_from: int | None = None
    tops: int = 0
    watch: tuple[int, ...] = ()
    words: bool = False
    experts_from: int | None = None
    tell_prompt: bool = False
    tell_versions: bool = False
    turn: Turn | None = None
