"""An answer on its way out: what is told of it so far, its text, and its log-probs in words.

The engine's thread goes on writing while a reply is being told, so a reply keeps its own copy of what it tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from miles.backends.native.answer import Answer
from miles.backends.native.request import Finish, Piece, Top
from miles.backends.native.server.wish import Wish
from miles.core.spelling import Spelling
from miles.core.types import Version

Name = Callable[[int], str]
"""The text of one token."""

Line = tuple[float | None, int, str | None]
"""A log-prob, its token, and the token's text where it is wanted: how SGLang writes one."""

LOWEST = -3.4028234663852886e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Log-probs of a run of tokens as they are told; ``tops`` and ``watched`` where they were asked for."""

    tokens: list[Line] = field(default_factory=list)
    tops: list[list[Line] | None] = field(default_factory=list)
    watched: list[list[Line] | None] = field(default_factory=list)


class Reply:
    """One answer and how it is told. ``name`` spells single tokens; without ``spelling`` there is no text."""

    def __init__(
        self,
        wish: Wish,
        prompt: Sequence[int],
        answer: Answer,
        *,
        spelling: Spelling | None,
        name: Name | None,
        label: Callable[[Version | None], str],
        started: float,
    ) -> None:
        self.wish = wish
        self.prompt = prompt
        self.answer = answer
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.output = Lines()
        self.started = started
        self.first: float | None = None  # when its first token was there
        self.ended: float | None = None
        self._spelling = spelling
        self._name = name if wish.words else None
        self._label = label
        self._text: str | None = None if spelling is None else ""
        self._stale = False
        self._input: Lines | None = None

    # -- growing ----------------------------------------------------------------------------

    def grow(self, piece: Piece, now: float) -> None:
        """Take more of the answer in."""
        if self.first is None:
            self.first = now
        self._add(piece.tokens, piece.logprobs, piece.tops, piece.watched)
        # The piece was cut before this is asked: more may have come, and the finish is that of all of it.
        if self.answer.finish is not None and len(self.tokens) == len(self.answer.logprobs):
            self.end(now)

    def end(self, now: float) -> None:
        """The answer has ended: take the rest of it in."""
        if self.finish is None:
            answer, told = self.answer, len(self.tokens)
            self._add(answer.tokens[told:], answer.logprobs[told:], answer.tops[told:], answer.watched[told:])
            self.finish, self.ended, self._stale = answer.finish, now, True

    def _add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[tuple[Top, ...]],
        watched: Sequence[tuple[Top, ...]],
    ) -> None:
        self.tokens.extend(tokens)
        if self._spelling is not None:
            self._spelling.add(tokens)
            self._stale = True
        if self.wish.logprobs:
            self.output.tokens.extend(self._lines(tokens, logprobs))
            self.output.tops.extend(self._beside(tops))
            self.output.watched.extend(self._beside(watched))

    # -- telling ----------------------------------------------------------------------------

    @property
    def version(self) -> str:
        """The label of the weights that drew its last token."""
        return self._label(self.answer.version)

    @property
    def versions(self) -> list[tuple[str, int]]:
        """The labels of all weights that drew what is told, in their turn, each with how many tokens are its own."""
        return [(self._label(version), count) for version, count in self.answer.runs(len(self.tokens))]

    @property
    def text(self) -> str | None:
        """What is certain of its text; all of it once it has ended."""
        spelling, finish, draw = self._spelling, self.finish, self.wish.draw
        if spelling is None or not self._stale:
            return self._text
        self._stale = False
        if finish is None:
            self._text = spelling.text()
            return self._text
        matched = finish.matched
        stop = matched if isinstance(matched, str) and matched in draw.sampling.stop else None
        drop = int(isinstance(matched, int) and draw.trim and bool(self.tokens))
        self._text = spelling.last(stop=stop, trim=draw.trim, drop=drop)
        return self._text

    def input(self) -> Lines:
        """The log-probs of the prompt from where they were asked for; as SGLang has it, that of the first is null.

        To be asked when something was drawn, or nothing will be: before that they may not all be there.
        """
        scores = self.answer.scores
        if self._input is not None or scores is None:
            return self._input or Lines()
        tokens = self.prompt[scores.first :]
        logprobs = [None, *scores.logprobs[1:]] if scores.logprobs else []
        lines = Lines(tokens=list(self._lines(tokens, logprobs)))
        if self.wish.tops and tokens:
            lines.tops.extend([None, *self._beside(scores.tops[1:])])
        if self.wish.watch and tokens:
            lines.watched.extend([None, *self._beside(scores.watched[1:])])
        self._input = lines
        return lines

    def _lines(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> Iterable[Line]:
        words = repeat(None) if self._name is None else map(self._name, tokens)
        return zip(logprobs, tokens, words, strict=False)

    def _beside(self, rows: Sequence[tuple[Top, ...]]) -> Iterable[list[Line] | None]:
        return ([self._line(logprob, token) for token, logprob in row] or None for row in rows)

    def _line(self, logprob: float, token: int) -> Line:
        """JSON has no infinity: what cannot come has the lowest number of float32, as SGLang has it."""
        return max(logprob, LOWEST), token, None if self._name is None else self._name(token)
