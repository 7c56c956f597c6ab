"""A trajectory as people read it in a terminal: who wrote what, each token of the policy coloured by its log-prob."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from typing import IO, Protocol

import numpy as np

from miles.core.roles import ROLES
from miles.core.types import Author, Floats, Span, Trajectory
from miles.observe.text import fixed

RESET, DIM, BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
BANDS: tuple[tuple[float, str, str], ...] = (
    (0.9, "\x1b[38;5;252m", "above 0.9"),
    (0.5, "\x1b[38;5;114m", "0.5 to 0.9"),
    (0.1, "\x1b[38;5;221m", "0.1 to 0.5"),
    (0.01, "\x1b[38;5;208m", "0.01 to 0.1"),
    (0.0, "\x1b[38;5;196m", "below 0.01"),
)
"""From the likeliest tokens to the least: the least probability of each band, its colour, and what the legend says."""
_CONTEXT = 6
"""Tokens before one that decide how it is written, such as whether a space comes first."""
_WHOLE = 24
"""Tokens that may come together before they make whole characters."""


class Writes(Protocol):
    """What turns tokens into text, special tokens written out."""

    def decode(self, tokens: Sequence[int]) -> str: ...


def is_coloured(wanted: bool, out: IO[str]) -> bool:
    """Whether to colour: a terminal that did not say no."""
    return wanted and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and out.isatty()


def legend() -> str:
    """What each colour stands for."""
    return "probability of a token: " + "  ".join(f"{colour}{name}{RESET}" for _, colour, name in BANDS)


def painted(trajectory: Trajectory, tokenizer: Writes, *, colour: bool) -> str:
    """Every span under the name of its author; branches one after the other, each its policy's where several play."""
    lines: list[str] = []
    roles = trajectory.metadata.get(ROLES, ())
    for number, branch in enumerate(trajectory.branches):
        role = f", {harmless(roles[number])}" if roles else ""
        if len(trajectory.branches) > 1 or role:
            lines.append(_bold(f"-- branch {number}{role}", colour))
        before: list[int] = []
        for span in branch:
            if len(span):
                lines += [_bold(_who(span), colour), _text(span, before, tokenizer, colour)]
            before = [*before, *span.tokens.tolist()][-_CONTEXT:]
    return "\n".join(lines)


def summed(trajectory: Trajectory, tokenizer: Writes) -> str:
    """The log-probs of what the policy wrote, in a line; empty where it wrote nothing."""
    spans = [span for span in trajectory.spans if span.author is Author.POLICY and len(span)]
    if not spans:
        return ""
    tokens = np.concatenate([span.tokens for span in spans])
    logprobs: Floats = np.concatenate([span.logprobs for span in spans if span.logprobs is not None])
    at = int(logprobs.argmin())
    lowest = f"lowest {fixed(float(logprobs[at]))} at token {at}, {harmless(tokenizer.decode([int(tokens[at])]))!r}"
    return f"log-prob mean {fixed(float(logprobs.mean()))}, {lowest}"


def harmless(text: str) -> str:
    """The text with what would command a terminal written out."""
    return "".join(c if c in "\n\t" or unicodedata.category(c)[0] != "C" else _named(c) for c in text)


def _named(char: str) -> str:
    return repr(char)[1:-1] if not char.isprintable() else char


def _who(span: Span) -> str:
    if span.author is not Author.POLICY:
        return f"{'environment' if span.author is Author.ENV else 'prompt'} ({len(span)} tokens)"
    assert span.version is not None
    name = "policy" if span.version.policy == "actor" else span.version.policy
    return f"{name}, version {span.version.number} ({len(span)} tokens)"


def _text(span: Span, before: list[int], tokenizer: Writes, colour: bool) -> str:
    if span.logprobs is None:
        words = harmless(_behind(before, span.tokens.tolist(), tokenizer))
        return f"{DIM}{words}{RESET}" if colour else words
    pieces = pieces_of(span.tokens.tolist(), before, tokenizer)
    if not colour:
        return "".join(harmless(text) for text, _ in pieces)
    out: list[str] = []
    at = 0
    for text, count in pieces:
        out.append(f"{_colour(float(span.logprobs[at : at + count].min()))}{_seen(text)}{RESET}")
        at += count
    return "".join(out)


def pieces_of(tokens: Sequence[int], before: Sequence[int], tokenizer: Writes) -> Iterator[tuple[str, int]]:
    """The text cut where tokens begin, and how many tokens each piece has: more than one where a character needs it."""
    context = list(before)
    waiting: list[int] = []
    for place, token in enumerate(tokens):
        waiting.append(token)
        text = _behind(context, waiting, tokenizer)
        if text.endswith("\ufffd") and len(waiting) < _WHOLE and place + 1 < len(tokens):
            continue
        yield text, len(waiting)
        context = [*context, *waiting][-_CONTEXT:]
        waiting = []


def _behind(context: Sequence[int], tokens: Sequence[int], tokenizer: Writes) -> str:
    """What tokens add to the text of those before them."""
    head, whole = tokenizer.decode(list(context)), tokenizer.decode([*context, *tokens])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(list(tokens))


def _colour(logprob: float) -> str:
    probability = float(np.exp(logprob))
    return next((colour for least, colour, _ in BANDS if probability >= least), BANDS[-1][1])


def _seen(text: str) -> str:
    """Text whose blanks have a colour too, where it is nothing but blanks."""
    text = harmless(text)
    return text if text.strip() else text.replace(" ", "·").replace("\t", "→\t").replace("\n", "↵\n")


def _bold(text: str, colour: bool) -> str:
    return f"{BOLD}{text}{RESET}" if colour else text
