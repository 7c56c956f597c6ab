"""Which tokens of a conversation the assistant wrote: its turns, found in what the chat template makes of them.

A template may say so itself, with ``{% generation %}``. Otherwise it is rendered up to each turn and through it:

    rendering of messages[:i], the assistant's turn opened    asked ..............
    rendering of messages[:i + 1]                             asked .............. turn i ....
    rendering of all of them                                  asked .............. turn i .... and so on

Each must be the beginning of the next, in text and in tokens; then turn i is what the first two differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from miles.core.errors import DataError
from miles.core.protocols import Tokenizer
from miles.core.types import EMPTY

Message = Mapping[str, Any]
Run = tuple[int, int]
"""From the first token to the one after the last."""

SKIPPED = ("loss", "weight", "step_loss_mask")
"""The fields of a message that say, with 0 or false, that it is context alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """A conversation in tokens, up to the last that is learned, and the runs of them that are, in order."""

    tokens: tuple[int, ...]
    runs: tuple[Run, ...]


class Unclear(Exception):
    """The turns of a conversation cannot be told apart in what its template writes; says why."""


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as a template should see them: without the fields that are for us."""
    return [{name: value for name, value in message.items() if name not in SKIPPED} for message in messages]


def is_learned(where: str, message: Message) -> bool:
    """Is it the assistant's, and not taken out by a field of its own? ``where`` is named when the field is no good."""
    own = message["role"] == "assistant"
    for name in (name for name in SKIPPED if name in message):
        if message[name] not in (0, 1):
            raise DataError(f"{where}: a message's {name} is {message[name]!r}, and must be 0 or 1, false or true.")
        if message[name] and not own:
            raise DataError(
                f"{where}: a message of {message['role']} has {name} {message[name]!r}, and only the assistant's are "
                "learned; take it out."
            )
        own = own and bool(message[name])
    return own


class Turns:
    """Finds turns in conversations. A turn ends with its last end-of-sequence token; what a template writes after it
    is not the assistant's."""

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int], template: Mapping[str, Any] = EMPTY
    ) -> None:
        assert eos_token_ids, "a turn must be able to end"
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._template = template

    def last(self, messages: Sequence[Message]) -> Taught:
        """The last message as the turn to learn, ended by an end-of-sequence token."""
        asked, whole = self._up_to(messages, len(messages) - 1), self._written(messages)
        found = self._cut(whole, [(len(asked), len(whole))]) if whole.startswith(asked) else None
        if found is None:
            return self._last_marked(messages)
        tokens, ((start, stop),) = found
        stop = self._end(tokens, start, stop)
        tokens = tokens[:stop]
        if tokens[-1] not in self._eos:
            tokens = [*tokens, self._eos[0]]
        return Taught(tokens=tuple(tokens), runs=((start, len(tokens)),))

    def all(self, messages: Sequence[Message], wanted: Sequence[int]) -> Taught:
        """The turns ``wanted``, all in one; a last message among them is ended by an end-of-sequence token."""
        marked = self._tokenizer.marked(plain(messages), **self._template)
        if marked is not None:
            return _taught(marked[0], _chosen(runs_of(marked[1]), messages, wanted))
        whole = self._written(messages)
        cuts: list[Run] = []
        for at in wanted:
            asked, upto = self._up_to(messages, at), self._written(messages[: at + 1])
            if not (whole.startswith(upto) and upto.startswith(asked)):
                raise Unclear("it rewrites earlier turns instead of appending to them")
            cuts.append((len(asked), len(upto)))
        found = self._cut(whole, cuts)
        if found is None:
            raise Unclear("a turn begins or ends within a token")
        tokens, runs = found
        runs = [(start, self._end(tokens, start, stop)) for start, stop in runs]
        start, stop = runs[-1]
        if wanted[-1] == len(messages) - 1 and tokens[stop - 1] not in self._eos:
            tokens, runs[-1] = [*tokens[:stop], self._eos[0]], (start, stop + 1)
        return _taught(tokens, runs)

    def _last_marked(self, messages: Sequence[Message]) -> Taught:
        marked = self._tokenizer.marked(plain(messages), **self._template)
        runs = [] if marked is None else runs_of(marked[1])
        if marked is None or not runs:
            raise Unclear("its question is not the beginning of it")
        return _taught(marked[0], runs[-1:])

    def _written(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.written(plain(messages), add_generation_prompt=False, **self._template)

    def _up_to(self, messages: Sequence[Message], at: int) -> str:
        return self._tokenizer.written(plain(messages[:at]), add_generation_prompt=True, **self._template)

    def _cut(self, whole: str, cuts: Sequence[Run]) -> tuple[list[int], list[Run]] | None:
        """The text in tokens and the cuts in them; None where a cut falls into a token."""
        places = [0, *(place for cut in cuts for place in cut), len(whole)]
        pieces = [self._tokenizer.encode(whole[a:b]) for a, b in pairwise(places)]
        tokens = self._tokenizer.encode(whole)
        if [token for piece in pieces for token in piece] == tokens:
            starts = list(accumulate(map(len, pieces)))
            return tokens, list(zip(starts[0:-1:2], starts[1::2], strict=True))
        # A piece by itself may be encoded otherwise, as with a space before it: then what stands before each cut tells.
        heads = [(self._tokenizer.encode(whole[:a]), self._tokenizer.encode(whole[:b])) for a, b in cuts]
        if any(tokens[: len(head)] != head for pair in heads for head in pair):
            return None
        return tokens, [(len(a), len(b)) for a, b in heads]

    def _end(self, tokens: Sequence[int], start: int, stop: int) -> int:
        """Where a turn ends: after its last end-of-sequence token, if it has one."""
        return max((at + 1 for at in range(start, stop) if tokens[at] in self._eos), default=stop)


def runs_of(marks: Sequence[bool]) -> list[Run]:
    """The runs of true marks.

    >>> runs_of([False, True, True, False, True])
    [(1, 3), (4, 5)]
    """
    return list(_runs(marks))


def _runs(marks: Sequence[bool]) -> Iterator[Run]:
    start = None
    for at, mark in enumerate([*marks, False]):
        if mark and start is None:
            start = at
        elif not mark and start is not None:
            yield start, at
            start = None


def _chosen(runs: Sequence[Run], messages: Sequence[Message], wanted: Sequence[int]) -> list[Run]:
    """The runs of the messages ``wanted``, a template having marked one for each of the assistant's."""
    own = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if len(own) == len(wanted) and runs:
        return list(runs)
    if len(own) != len(runs):
        raise Unclear(f"it marks {len(runs)} passages in {len(own)} messages of the assistant's, not all to be learned")
    return [run for at, run in zip(own, runs, strict=True) if at in wanted]


def _taught(tokens: Sequence[int], runs: Sequence[Run]) -> Taught:
    return Taught(tokens=tuple(tokens[: runs[-1][1]]), runs=tuple(runs))
