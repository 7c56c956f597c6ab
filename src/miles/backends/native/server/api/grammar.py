"""Constrained decoding with llguidance: a JSON schema, regular expression or EBNF grammar as an engine ``Constraint``.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from miles.backends.native.server.api.request_types import GrammarRule
from miles.core.errors import EngineError
from miles.rollout.serving.errors import RequestError

MAX_CACHED = 256
_MAX_SOURCE_LENGTH = 1 << 20


class _Matcher(Protocol):
    """The methods of llguidance's matcher that are used here."""

    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, sampled_token: int, /) -> bool: ...
    def deep_copy(self) -> _Matcher: ...
    def is_error(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def get_error(self) -> str: ...


class GrammarMatcher:
    """Implements request.Constraint: one request's state in a grammar.

    At the end of the grammar only end-of-sequence tokens are allowed; after one of them it is finished.
    """

    def __init__(self, matcher: _Matcher, eos_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_tokens = eos_tokens
        self._finished = False

    def get_allowed_tokens(self) -> NDArray[np.int32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot be followed: {_shorten(self._matcher.get_error())}")
        return mask

    def advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise EngineError(f"the grammar cannot be followed: {_shorten(self._matcher.get_error())}")
        self._finished = self._matcher.is_stopped() and token in self._eos_tokens

    def is_finished(self) -> bool:
        return self._finished

    def copy(self) -> GrammarMatcher:
        other = GrammarMatcher(self._matcher.deep_copy(), self._eos_tokens)
        other._finished = self._finished
        return other


class GrammarCache:
    """Compiled grammars of one tokenizer, in an LRU cache. May be called from any thread.

    ``tokenizer`` is the text of a ``tokenizer.json``.
    """

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_tokens: Sequence[int]) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise RequestError(
                "Constrained decoding (json_schema, regex, ebnf) needs llguidance: pip install 'miles-rl[serve]'.",
                status=501,
            ) from error
        self._tokenizer: Any = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_tokens) or None)
        self._eos_tokens = frozenset(self._tokenizer.eos_tokens)
        self._compiled: OrderedDict[GrammarRule, _Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def build_constraint(self, rule: GrammarRule) -> GrammarMatcher:
        """A constraint at the start of the grammar; an invalid rule is refused. Compiling is slow."""
        with self._lock:
            matcher = self._compiled.get(rule)
            if matcher is not None:
                self._compiled.move_to_end(rule)
        if matcher is None:
            matcher = self._compile(rule)
            with self._lock:
                self._compiled[rule] = matcher
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
        return GrammarMatcher(matcher.deep_copy(), self._eos_tokens)

    def _compile(self, rule: GrammarRule) -> _Matcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(rule.source) > _MAX_SOURCE_LENGTH:
            raise RequestError(
                f"{rule.kind} has {len(rule.source)} characters, but the limit is {_MAX_SOURCE_LENGTH}.",
                param=rule.kind,
            )
        try:
            grammar = _convert_rule(rule)
        except Exception as error:  # llguidance may raise anything on an invalid rule
            raise RequestError(f"{rule.kind} cannot be used: {_shorten(str(error))}.", param=rule.kind) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise RequestError(f"{rule.kind} cannot be used: {_shorten(matcher.get_error())}.", param=rule.kind)
        return matcher


def _convert_rule(rule: GrammarRule) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if rule.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.loads(rule.source))
    if rule.kind == "regex":
        return LLMatcher.grammar_from_regex(rule.source)
    return LLMatcher.grammar_from_lark(any_to_lark(rule.source))


def _shorten(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")
