"""Terminal rendering of a trajectory: spans by author, policy tokens coloured by probability."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

import numpy as np

from miles.core.agents import ROLES
from miles.core.media import ImageInput
from miles.core.types import Author, Floats, Span, Trajectory
from miles.observe.formatting import format_fixed

RESET = "\x1b[0m"
DIM = "\x1b[2m"
BOLD = "\x1b[1m"
BANDS: tuple[tuple[float, str, str], ...] = (
    (0.9, "\x1b[38;5;252m", "above 0.9"),
    (0.5, "\x1b[38;5;114m", "0.5 to 0.9"),
    (0.1, "\x1b[38;5;221m", "0.1 to 0.5"),
    (0.01, "\x1b[38;5;208m", "0.01 to 0.1"),
    (0.0, "\x1b[38;5;196m", "below 0.01"),
)
"""Colour bands from likely to unlikely tokens: minimum probability, colour, and legend text."""
_CONTEXT = 6
"""Context tokens that affect how a token decodes, such as whether a space comes first."""
_MAX_PIECE = 24
"""Maximum number of tokens that are joined to complete a character."""
_MAX_CALL = 240
"""Maximum number of characters of a tool call below its turn; the turn itself has all of it."""


class TokenDecoder(Protocol):
    """Decodes tokens to text, with special tokens."""

    def decode(self, tokens: Sequence[int]) -> str: ...


def is_coloured(requested: bool, out: IO[str]) -> bool:
    """Return whether to use colour: on a terminal that allows it."""
    return requested and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and out.isatty()


def legend() -> str:
    """Return the colour legend."""
    return "probability of a token: " + "  ".join(f"{colour}{name}{RESET}" for _, colour, name in BANDS)


def render_trajectory(
    trajectory: Trajectory,
    tokenizer: TokenDecoder,
    *,
    colour: bool,
    describe_image: Callable[[ImageInput], str] | None = None,
) -> str:
    """Render every span under its author's name, branch by branch, with roles in multi-agent trajectories.

    Below a turn are the tool calls that were parsed from it, and with ``describe_image`` below a span its images.
    """
    lines: list[str] = []
    roles = trajectory.metadata.get(ROLES, ())
    for number, branch in enumerate(trajectory.branches):
        role = f", {escape_control(roles[number])}" if roles else ""
        if len(trajectory.branches) > 1 or role:
            lines.append(_bold(f"-- branch {number}{role}", colour))
        before: list[int] = []
        turns = number_turns(branch)
        last = max(turns, default=0)
        calls = list_calls(trajectory, last)
        for place, (span, turn) in enumerate(zip(branch, turns, strict=True)):
            if len(span):
                title = _format_author(span, turn if last > 1 else 0)
                lines += [_bold(title, colour), _render_span(span, before, tokenizer, colour)]
            if turn and turn not in turns[place + 1 :]:
                lines += [f"  call {call}" for call in calls.get(turn, ())]
            if describe_image is not None:
                lines += [
                    f"  {each.image.kind} {each.image.source[:12]}: {escape_control(describe_image(each.image))}"
                    for each in span.images
                ]
            before = [*before, *span.tokens.tolist()][-_CONTEXT:]
    return "\n".join(lines)


def number_turns(branch: Sequence[Span]) -> list[int]:
    """The turn of each span of the policy, counted from 1, and 0 for other spans; a turn may be of several spans."""
    turns: list[int] = []
    turn = 0
    for place, span in enumerate(branch):
        is_policy = span.author is Author.POLICY
        turn += is_policy and (place == 0 or not turns[-1])
        turns.append(turn if is_policy else 0)
    return turns


def list_calls(trajectory: Trajectory, num_turns: int) -> Mapping[int, list[str]]:
    """The tool calls of each turn, from the recorded messages; none where turns and messages cannot be matched."""
    messages = trajectory.metadata.get("messages", ())
    replies = [each for each in messages if isinstance(each, Mapping) and each.get("role") == "assistant"]
    if len(trajectory.branches) > 1 or len(replies) < num_turns:
        return {}
    own = replies[len(replies) - num_turns :]  # earlier ones are of the prompt
    return {
        turn: [_format_call(call.get("function", {})) for call in reply.get("tool_calls") or ()]
        for turn, reply in enumerate(own, start=1)
    }


def _format_call(function: Mapping[str, Any]) -> str:
    """A call as ``zoom(x=0.5, y=0.25)``; arguments that are no JSON object as they are."""
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    text = escape_control(f"{function.get('name')}({arguments})")
    return text if len(text) <= _MAX_CALL else f"{text[:_MAX_CALL]}..."


def summarize_logprobs(trajectory: Trajectory, tokenizer: TokenDecoder) -> str:
    """Summarise the log-probs of the sampled tokens in one line; empty if there are none."""
    spans = [span for span in trajectory.spans if span.author is Author.POLICY and len(span)]
    if not spans:
        return ""
    tokens = np.concatenate([span.tokens for span in spans])
    logprobs: Floats = np.concatenate([span.logprobs for span in spans if span.logprobs is not None])
    index = int(logprobs.argmin())
    text = escape_control(tokenizer.decode([int(tokens[index])]))
    lowest = f"lowest {format_fixed(float(logprobs[index]))} at token {index}, {text!r}"
    return f"log-prob mean {format_fixed(float(logprobs.mean()))}, {lowest}"


def escape_control(text: str) -> str:
    """Escape terminal control characters."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else _escape(c) for c in text)


def _escape(char: str) -> str:
    return repr(char)[1:-1] if not char.isprintable() else char


def _format_author(span: Span, turn: int) -> str:
    if span.author is not Author.POLICY:
        return f"{'environment' if span.author is Author.ENV else 'prompt'} ({len(span)} tokens)"
    assert span.version is not None
    name = "policy" if span.version.policy == "actor" else span.version.policy
    number = f", turn {turn}" if turn else ""
    return f"{name}, version {span.version.number}{number} ({len(span)} tokens)"


def _render_span(span: Span, before: list[int], tokenizer: TokenDecoder, colour: bool) -> str:
    if span.logprobs is None:
        text = _render_context(span, before, tokenizer)
        return f"{DIM}{text}{RESET}" if colour else text
    pieces = split_into_pieces(span.tokens.tolist(), before, tokenizer)
    if not colour:
        return "".join(escape_control(text) for text, _ in pieces)
    out: list[str] = []
    start = 0
    for text, count in pieces:
        lowest = float(span.logprobs[start : start + count].min())
        out.append(f"{_select_colour(lowest)}{_mark_blanks(text)}{RESET}")
        start += count
    return "".join(out)


def _render_context(span: Span, before: list[int], tokenizer: TokenDecoder) -> str:
    """The text of a span that was not sampled, with images as their hash and size."""
    tokens = span.tokens.tolist()
    pieces: list[str] = []
    start = 0
    for placed in span.images:
        pieces.append(escape_control(_decode_after(before, tokens[start : placed.start], tokenizer)))
        pieces.append(f"[{placed.image.kind} {placed.image.source[:12]}, {placed.length} tokens]")
        before, start = tokens[max(0, placed.end - _CONTEXT) : placed.end], placed.end
    return "".join(pieces) + escape_control(_decode_after(before, tokens[start:], tokenizer))


def split_into_pieces(
    tokens: Sequence[int], before: Sequence[int], tokenizer: TokenDecoder
) -> Iterator[tuple[str, int]]:
    """Split the text at token boundaries; yields each piece and its number of tokens (several for split characters)."""
    context = list(before)
    pending: list[int] = []
    for index, token in enumerate(tokens):
        pending.append(token)
        text = _decode_after(context, pending, tokenizer)
        if text.endswith("\ufffd") and len(pending) < _MAX_PIECE and index + 1 < len(tokens):
            continue
        yield text, len(pending)
        context = [*context, *pending][-_CONTEXT:]
        pending = []


def _decode_after(context: Sequence[int], tokens: Sequence[int], tokenizer: TokenDecoder) -> str:
    """Return the text that tokens add to the text of their context."""
    prefix, full = tokenizer.decode(list(context)), tokenizer.decode([*context, *tokens])
    return full[len(prefix) :] if full.startswith(prefix) else tokenizer.decode(list(tokens))


def _select_colour(logprob: float) -> str:
    probability = float(np.exp(logprob))
    return next((colour for least, colour, _ in BANDS if probability >= least), BANDS[-1][1])


def _mark_blanks(text: str) -> str:
    """Make whitespace visible in text that is only whitespace."""
    text = escape_control(text)
    return text if text.strip() else text.replace(" ", "·").replace("\t", "→\t").replace("\n", "↵\n")


def _bold(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{RESET}" if colour else text
