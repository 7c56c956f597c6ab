"""What is asked of the engine, and the words of its answer.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from miles.core.protocols import Sampling
from miles.core.types import Tokens

Top = tuple[int, float]
"""A token and its log-prob."""


class Constraint(Protocol):
    """Which tokens may come next: a grammar, a schema. It is one request's own, and is told every token once.

    ``allowed`` is an array of V truth values, or of V / 32 words of bits, lowest bit first. When ``finished``,
    the request ends. An error it raises is its request's alone.
    """

    def allowed(self) -> NDArray[np.bool_] | NDArray[np.int32]: ...
    def advance(self, token: int) -> None: ...
    def finished(self) -> bool: ...


def _no_bias() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``sampling.max_new_tokens`` 0 is allowed here: the prompt is computed (and scored), no more.

    ``score_from``: log-probs of the prompt's tokens from this position on. ``tops``: so many of the likeliest
    tokens beside each drawn and scored one; ``watch``: the log-probs of these tokens beside each. Penalties count
    what the request has drawn so far; ``min_new_tokens`` keeps end-of-sequence and stop tokens away until then.
    Of those that wait, a higher ``priority`` comes first. Without ``routed`` the answer carries no experts.
    """

    tokens: Tokens
    sampling: Sampling
    rid: str = ""
    priority: int = 0
    score_from: int | None = None
    tops: int = 0
    watch: tuple[int, ...] = ()
    constraint: Constraint | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=_no_bias)
    min_new_tokens: int = 0
    stop_regex: tuple[str, ...] = ()
    routed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some more of an answer: drawn tokens, the ``first`` of them at this place of the response.

    ``tops`` and ``watched`` have an entry a token where they were asked for, and none where they were not.
    """

    first: int
    tokens: Items[int]
    logprobs: Items[float]
    tops: Items[tuple[Top, ...]] = ()
    watched: Items[tuple[Top, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs of the prompt's tokens from position ``first`` on; that of the very first token is None.

    ``tops`` and ``watched`` have an entry a token where they were asked for (empty for the very first token).
    """

    first: int
    logprobs: Items[float | None]
    tops: Items[tuple[Top, ...]] = ()
    watched: Items[tuple[Top, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why an answer ended: at what ``matched`` (a token, a string, or a pattern), at its ``length``, or aborted."""

    kind: Literal["stop", "length", "abort"]
    length: int
    matched: int | str | None = None
    message: str = ""
