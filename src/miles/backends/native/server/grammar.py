"""Constrained decoding: a JSON schema, a regular expression or a grammar as the engine's ``Constraint``, by llguidance.

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

from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.wish import Rule
from miles.core.errors import EngineError, UsageError

KEPT = 256
_LONGEST = 1 << 20


class _Matcher(Protocol):
    """The part of llguidance's matcher that is used here."""

    def compute_bitmask(self) -> bytes: ...
    def consume_token(self, sampled_token: int, /) -> bool: ...
    def deep_copy(self) -> _Matcher: ...
    def is_error(self) -> bool: ...
    def is_stopped(self) -> bool: ...
    def get_error(self) -> str: ...


class Matched:
    """Implements request.Constraint: one request's place in a grammar.

    At the end of the grammar only the tokens that end a sequence are allowed; once one came it is finished.
    """

    def __init__(self, matcher: _Matcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._ended = False

    def allowed(self) -> NDArray[np.int32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")
        return mask

    def advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise EngineError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")
        self._ended = self._matcher.is_stopped() and token in self._ends

    def finished(self) -> bool:
        return self._ended


class Grammars:
    """Rules of one tokenizer, compiled once and kept while they are in use. May be called from any thread.

    ``tokenizer`` is the text of a ``tokenizer.json``; ``ends`` are the tokens that end a sequence.
    """

    def __init__(self, tokenizer: str, *, vocab_size: int, ends: Sequence[int]) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise UsageError(
                "Constrained output (json_schema, regex, ebnf) needs llguidance: pip install 'miles-rl[serve]'."
            ) from error
        self._tokenizer: Any = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(ends) or None)
        self._ends = frozenset(self._tokenizer.eos_tokens)
        self._made: OrderedDict[Rule, _Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, rule: Rule) -> Matched:
        """A fresh start in the grammar of ``rule``; a rule that is not one is refused. Compiling takes its time."""
        with self._lock:
            matcher = self._made.get(rule)
            if matcher is not None:
                self._made.move_to_end(rule)
        if matcher is None:
            matcher = self._compile(rule)
            with self._lock:
                self._made[rule] = matcher
                if len(self._made) > KEPT:
                    self._made.popitem(last=False)
        return Matched(matcher.deep_copy(), self._ends)

    def _compile(self, rule: Rule) -> _Matcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(rule.source) > _LONGEST:
            raise Refusal(f"{rule.kind} has {len(rule.source)} characters, but may have {_LONGEST}.", param=rule.kind)
        try:
            grammar = _grammar(rule)
        except Exception as error:  # whatever a foreign parser raises on a rule that is not one
            raise Refusal(f"{rule.kind} cannot be used: {_first_line(str(error))}.", param=rule.kind) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise Refusal(f"{rule.kind} cannot be used: {_first_line(matcher.get_error())}.", param=rule.kind)
        return matcher


def _grammar(rule: Rule) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if rule.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.loads(rule.source))
    if rule.kind == "regex":
        return LLMatcher.grammar_from_regex(rule.source)
    return LLMatcher.grammar_from_lark(any_to_lark(rule.source))


def _first_line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")
