"""The gate: what can never be served is refused in one sentence, the rest becomes a sequence."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count

import numpy as np

from miles.backends.native.request import Ask
from miles.backends.native.sequence import Sequence, words_of
from miles.core.errors import EngineError
from miles.core.protocols import Sampling
from miles.core.types import Array
from miles.models.spec import DecoderSpec


class Gate:
    """Knows the model's limits, and those of the cache (``capacity`` tokens)."""

    def __init__(self, name: str, spec: DecoderSpec, capacity: int, *, decodes: bool) -> None:
        self._name = name
        self._spec = spec
        self._capacity = capacity
        self._decodes = decodes
        self._numbers = count()

    def admit(self, ask: Ask, now: float) -> Sequence:
        """A sequence for a request that can be served."""
        prompt = np.asarray(ask.tokens)
        problems = chain(self._misfits(prompt, ask), _manners(ask.sampling), self._oddities(ask), _patterns(ask))
        if (problem := next(problems, None)) is not None:
            raise EngineError(f"{self._name} cannot serve the request: {problem}")
        sampling, stops, number = ask.sampling, ask.sampling.stop_token_ids, next(self._numbers)
        # What the model cannot draw ends nothing.
        barred = tuple(one for one in (*self._spec.eos_token_ids, *stops) if 0 <= one < self._spec.vocab_size)
        prompt_T = prompt.astype(np.int64)
        sequence = Sequence(
            number=number,
            ask=ask,
            prompt_length=len(prompt),
            prompt_T=prompt_T,
            key=prompt_T.tobytes(),
            ends=frozenset(token for token in barred if token in stops or not sampling.ignore_eos),
            barred=barred,
            tail=tail_of(ask),
            tokens=prompt_T.tolist(),
            limit=len(prompt) + sampling.max_new_tokens,
            rank=(-ask.priority, number),
            vocabulary=self._spec.vocab_size,
            arrived=now,
        )
        sequence.unscore()
        if sequence.dependent:
            sequence.counts = Counter()
        if ask.constraint is not None:
            sequence.mask_Z = words_of(ask.constraint.allowed(), self._spec.vocab_size)
        return sequence

    def _misfits(self, prompt: Array, ask: Ask) -> Iterator[str]:
        if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind not in "iu":
            yield f"a prompt is a non-empty list of tokens, not {prompt.dtype} of shape {prompt.shape}"
            return
        most, positions = ask.sampling.max_new_tokens, self._spec.max_positions
        if (odd := self._foreign(prompt)) is not None:
            yield f"token {odd} is outside the vocabulary of {self._spec.vocab_size}"
        if most < 0:
            yield f"max_new_tokens is {most}, must be at least 0"
        asked = f"{len(prompt)} prompt tokens and max_new_tokens {most}"
        if len(prompt) + most > positions:
            yield f"{asked} exceed the model's {positions} positions"
        if len(prompt) + most > self._capacity:
            yield f"{asked} exceed the key-value cache of {self._capacity} tokens; raise --engine-kv-tokens"
        if ask.score_from is not None and not 0 <= ask.score_from <= len(prompt):
            yield f"score_from is {ask.score_from}, must be between 0 and the prompt's {len(prompt)} tokens"

    def _oddities(self, ask: Ask) -> Iterator[str]:
        size = self._spec.vocab_size
        if (ask.sampling.stop or ask.stop_regex) and not self._decodes:
            yield "stop strings need a tokenizer, and this engine was made without one; use stop_token_ids"
        if ask.tops < 0:
            yield f"tops is {ask.tops}, must be at least 0"
        if not 0 <= ask.min_new_tokens <= ask.sampling.max_new_tokens:
            yield f"min_new_tokens is {ask.min_new_tokens}, must be between 0 and max_new_tokens"
        for name, tokens in (("watch", ask.watch), ("logit_bias", tuple(ask.logit_bias))):
            if tokens and (odd := self._foreign(np.array(tokens))) is not None:
                yield f"{name} names token {odd}, outside the vocabulary of {size}"
        if not all(math.isfinite(bias) for bias in ask.logit_bias.values()):
            yield "a logit_bias is not a finite number"
        for name, value in (("frequency", ask.frequency_penalty), ("presence", ask.presence_penalty)):
            if not -2 <= value <= 2:
                yield f"{name}_penalty is {value}, must be between -2 and 2"
        if not 0 < ask.repetition_penalty <= 2:
            yield f"repetition_penalty is {ask.repetition_penalty}, must be above 0 and at most 2"

    def _foreign(self, tokens: Array) -> int | None:
        """A token that is not in the vocabulary."""
        least, most = int(tokens.min()), int(tokens.max())
        return least if least < 0 else most if most >= self._spec.vocab_size else None


def _manners(sampling: Sampling) -> Iterator[str]:
    if not 0 <= sampling.temperature < float("inf"):
        yield f"temperature is {sampling.temperature}, must be 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p is {sampling.top_p}, must be above 0 and at most 1"
    if sampling.top_k != -1 and sampling.top_k < 1:
        yield f"top_k is {sampling.top_k}, must be -1 (off) or at least 1"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p is {sampling.min_p}, must be between 0 and 1"
    if "" in sampling.stop:
        yield "a stop string is empty"


def _patterns(ask: Ask) -> Iterator[str]:
    for pattern in ask.stop_regex:
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"stop_regex {pattern!r} is not a regular expression: {error}"


def tail_of(ask: Ask) -> int:
    """How many last tokens can hold a stop string that the very last one completed; for a pattern, all of them.

    A token is at least one byte, so a string of n bytes lies in n tokens; four more keep it clear of a
    character that the cut may have split.
    """
    if ask.stop_regex:
        return ask.sampling.max_new_tokens
    return 4 + max(len(text.encode()) for text in ask.sampling.stop) if ask.sampling.stop else 0
