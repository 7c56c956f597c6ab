"""Request and response types of the engine: ``GenerateRequest`` in; output chunks, log-probs and a finish reason out.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from miles.core.media import Images
from miles.core.protocols import SamplingParams
from miles.core.types import Tokens

Ints = NDArray[np.int64]
Uints = NDArray[np.uint64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
BitWords = NDArray[np.int32]

TokenLogprob = tuple[int, float]
"""A token id and its log-prob."""


class Constraint(Protocol):
    """Constrained decoding of one request: which tokens may come next under a grammar or JSON schema.

    ``get_allowed_tokens`` returns V booleans, or V / 32 words of bits, lowest bit first. ``advance`` is called once per
    sampled token. The request ends when ``is_finished`` returns true. ``copy`` returns one in the same state that is
    advanced by itself, with drafted tokens. An error raised here fails only its own request.
    """

    def get_allowed_tokens(self) -> NDArray[np.bool_] | NDArray[np.int32]: ...
    def advance(self, token: int) -> None: ...
    def is_finished(self) -> bool: ...
    def copy(self) -> Constraint: ...


def _empty_bias() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request. With ``sampling.max_new_tokens`` 0 only the prompt is computed (and its log-probs returned).

    ``logprob_start_len``: return log-probs of the prompt tokens from this position on. ``top_logprobs_num``: return
    this many most likely tokens at each sampled and scored position; ``token_ids_logprob``: return the log-probs of
    these tokens at each position. Penalties count the tokens sampled so far; ``min_new_tokens`` bans EOS and stop
    tokens until then. Among waiting requests a higher ``priority`` is scheduled first. ``images`` are placed among
    ``tokens``. ``lora`` names the adapter to generate with, which is applied beside the weights.
    """

    tokens: Tokens
    sampling: SamplingParams
    rid: str = ""
    priority: int = 0
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    constraint: Constraint | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=_empty_bias)
    min_new_tokens: int = 0
    stop_regex: tuple[str, ...] = ()
    return_routed_experts: bool = True
    images: Images = ()
    lora: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Newly sampled tokens of a request; ``first`` is the index of the first one in the response.

    ``top_logprobs`` and ``token_ids_logprobs`` have one entry per token if they were requested, else none.
    """

    first: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[tuple[TokenLogprob, ...]] = ()
    token_ids_logprobs: Sequence[tuple[TokenLogprob, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probs of the prompt tokens from position ``first`` on; None for the very first token.

    ``top_logprobs`` and ``token_ids_logprobs`` have one entry per token if requested (empty for the first token).
    """

    first: int
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[tuple[TokenLogprob, ...]] = ()
    token_ids_logprobs: Sequence[tuple[TokenLogprob, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """Why a request ended: a stop token, string or pattern ``matched``, its maximum ``length``, or an abort."""

    kind: Literal["stop", "length", "abort"]
    length: int
    matched: int | str | None = None
    message: str = ""
