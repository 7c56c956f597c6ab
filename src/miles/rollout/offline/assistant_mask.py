"""Assistant-token masks: the tokens of a conversation that the assistant wrote, found through the chat template.

A template may mark them itself, with ``{% generation %}``. Otherwise it is rendered up to each turn and through it:

    rendering of messages[:i], with a generation prompt       prefix .............
    rendering of messages[:i + 1]                             prefix ............. turn i ....
    rendering of all of them                                  prefix ............. turn i .... and so on

Each must be a prefix of the next, in text and in tokens; then turn i is the difference of the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from miles.core.errors import DataError
from miles.core.media import Images
from miles.core.media_store import find_references
from miles.core.protocols import ImageTokenizer, Tokenizer
from miles.core.types import EMPTY
from miles.rollout.images import TEXT_ONLY

Message = Mapping[str, Any]
TokenRange = tuple[int, int]
"""Start and end (exclusive) of a token range."""

LOSS_FIELDS = ("loss", "weight", "step_loss_mask")
"""Message fields that exclude a message from the loss with 0 or false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedConversation:
    """A conversation's tokens, up to the last trained one, the ranges to train on, in order, and its images."""

    tokens: tuple[int, ...]
    runs: tuple[TokenRange, ...]
    images: Images = ()


def expand_images(
    conversation: MaskedConversation, tokenizer: Tokenizer, messages: Sequence[Message]
) -> MaskedConversation:
    """Replace the image markers of a conversation by the tokens of its images."""
    references = find_references(messages)
    if not references:
        return conversation
    if not isinstance(tokenizer, ImageTokenizer):
        raise DataError(TEXT_ONLY)
    tokens = conversation.tokens

    def expand(length: int) -> tuple[list[int], Images]:
        return tokenizer.expand_tokens(tokens[:length], references[: tokenizer.count_markers(tokens[:length])])

    if any(tokenizer.count_markers(tokens[start:stop]) for start, stop in conversation.runs):
        raise DataError("an assistant message that is trained on has an image; the policy samples none.")
    expanded, images = expand(len(tokens))
    runs = tuple((len(expand(start)[0]), len(expand(stop)[0])) for start, stop in conversation.runs)
    return MaskedConversation(tokens=tuple(expanded), runs=runs, images=images)


class AmbiguousTurns(Exception):
    """The template's rendering does not show where turns begin and end; the message says why."""


def strip_mask_fields(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages for the template: without the loss fields."""
    return [{name: value for name, value in message.items() if name not in LOSS_FIELDS} for message in messages]


def is_trained_message(where: str, message: Message) -> bool:
    """Whether it is an assistant message that its fields do not exclude; ``where`` locates an invalid field in
    errors."""
    assistant_turns = message["role"] == "assistant"
    for name in (name for name in LOSS_FIELDS if name in message):
        if message[name] not in (0, 1):
            raise DataError(f"{where}: a message's {name} is {message[name]!r}, and must be 0 or 1, false or true.")
        if message[name] and not assistant_turns:
            raise DataError(
                f"{where}: a message of {message['role']} has {name} {message[name]!r}, and only assistant messages "
                f"are "
                "trained on; remove the field."
            )
        assistant_turns = assistant_turns and bool(message[name])
    return assistant_turns


class AssistantMasker:
    """Finds assistant turns. A turn ends with its last end-of-sequence token; what a template writes after it is not
    the assistant's."""

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int], template: Mapping[str, Any] = EMPTY
    ) -> None:
        assert eos_token_ids, "a turn must be able to end"
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._template = template

    def last(self, messages: Sequence[Message]) -> MaskedConversation:
        """Train on the last message, which gets an end-of-sequence token if it lacks one."""
        prefix, full_text = self._render_prompt(messages, len(messages) - 1), self._render(messages)
        found = (
            self._to_token_ranges(full_text, [(len(prefix), len(full_text))]) if full_text.startswith(prefix) else None
        )
        if found is None:
            return self._mask_last_from_template(messages)
        tokens, ((start, stop),) = found
        stop = self._turn_end(tokens, start, stop)
        tokens = tokens[:stop]
        if tokens[-1] not in self._eos:
            tokens = [*tokens, self._eos[0]]
        return MaskedConversation(tokens=tuple(tokens), runs=((start, len(tokens)),))

    def all(self, messages: Sequence[Message], wanted: Sequence[int]) -> MaskedConversation:
        """Train on the turns ``wanted``, in one sequence; a last message gets an end-of-sequence token if it lacks
        one."""
        marked = self._tokenizer.apply_chat_template_with_mask(strip_mask_fields(messages), **self._template)
        if marked is not None:
            return _truncate(marked[0], _select_ranges(find_runs(marked[1]), messages, wanted))
        full_text = self._render(messages)
        char_ranges: list[TokenRange] = []
        for at in wanted:
            prefix, upto = self._render_prompt(messages, at), self._render(messages[: at + 1])
            if not (full_text.startswith(upto) and upto.startswith(prefix)):
                raise AmbiguousTurns("it rewrites earlier turns instead of appending to them")
            char_ranges.append((len(prefix), len(upto)))
        found = self._to_token_ranges(full_text, char_ranges)
        if found is None:
            raise AmbiguousTurns("a turn begins or ends within a token")
        tokens, runs = found
        runs = [(start, self._turn_end(tokens, start, stop)) for start, stop in runs]
        start, stop = runs[-1]
        if wanted[-1] == len(messages) - 1 and tokens[stop - 1] not in self._eos:
            tokens, runs[-1] = [*tokens[:stop], self._eos[0]], (start, stop + 1)
        return _truncate(tokens, runs)

    def _mask_last_from_template(self, messages: Sequence[Message]) -> MaskedConversation:
        marked = self._tokenizer.apply_chat_template_with_mask(strip_mask_fields(messages), **self._template)
        runs = [] if marked is None else find_runs(marked[1])
        if marked is None or not runs:
            raise AmbiguousTurns("its question is not the beginning of it")
        return _truncate(marked[0], runs[-1:])

    def _render(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat_text(
            strip_mask_fields(messages), add_generation_prompt=False, **self._template
        )

    def _render_prompt(self, messages: Sequence[Message], at: int) -> str:
        return self._tokenizer.render_chat_text(
            strip_mask_fields(messages[:at]), add_generation_prompt=True, **self._template
        )

    def _to_token_ranges(
        self, full_text: str, char_ranges: Sequence[TokenRange]
    ) -> tuple[list[int], list[TokenRange]] | None:
        """Tokenize the text and convert character ranges to token ranges; None where a boundary is inside a token."""
        boundaries = [0, *(place for cut in char_ranges for place in cut), len(full_text)]
        pieces = [self._tokenizer.encode(full_text[a:b]) for a, b in pairwise(boundaries)]
        tokens = self._tokenizer.encode(full_text)
        if [token for piece in pieces for token in piece] == tokens:
            starts = list(accumulate(map(len, pieces)))
            return tokens, list(zip(starts[0:-1:2], starts[1::2], strict=True))
        # A piece may tokenize differently by itself, as with a leading space: then compare tokenized prefixes.
        heads = [(self._tokenizer.encode(full_text[:a]), self._tokenizer.encode(full_text[:b])) for a, b in char_ranges]
        if any(tokens[: len(head)] != head for pair in heads for head in pair):
            return None
        return tokens, [(len(a), len(b)) for a, b in heads]

    def _turn_end(self, tokens: Sequence[int], start: int, stop: int) -> int:
        """The end of a turn: after its last end-of-sequence token, if it has one."""
        return max((at + 1 for at in range(start, stop) if tokens[at] in self._eos), default=stop)


def find_runs(flags: Sequence[bool]) -> list[TokenRange]:
    """Find the ranges of true values.

    >>> find_runs([False, True, True, False, True])
    [(1, 3), (4, 5)]
    """
    return list(_runs(flags))


def _runs(flags: Sequence[bool]) -> Iterator[TokenRange]:
    start = None
    for at, mark in enumerate([*flags, False]):
        if mark and start is None:
            start = at
        elif not mark and start is not None:
            yield start, at
            start = None


def _select_ranges(runs: Sequence[TokenRange], messages: Sequence[Message], wanted: Sequence[int]) -> list[TokenRange]:
    """The ranges of the messages ``wanted``, where a template marked one for each assistant message."""
    assistant_turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if len(assistant_turns) == len(wanted) and runs:
        return list(runs)
    if len(assistant_turns) != len(runs):
        raise AmbiguousTurns(
            f"it marks {len(runs)} passages in {len(assistant_turns)} messages of the assistant's, not all to be "
            f"learned"
        )
    return [run for at, run in zip(assistant_turns, runs, strict=True) if at in wanted]


def _truncate(tokens: Sequence[int], runs: Sequence[TokenRange]) -> MaskedConversation:
    return MaskedConversation(tokens=tuple(tokens[: runs[-1][1]]), runs=tuple(runs))
