"""Does a message replay one that is stored, and how far down the tree does a whole request?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles.core.errors import UsageError
from miles.rollout.session.message import Message, calls_of, function_of, said_in
from miles.rollout.session.tree import Node, Tree


class Match(Protocol):
    """Does ``given``, from a request, replay ``stored``?"""

    def __call__(self, stored: Message, given: Message) -> bool: ...


def strict(stored: Message, given: Message) -> bool:
    """All a model may see is equal; None, an empty text and nothing at all are the same, and so are text and its parts.

    >>> strict({"role": "assistant", "content": None}, {"role": "assistant", "content": ""})
    True
    """
    return (
        role_content_only(stored, given)
        and _said(stored) == _said(given)
        and [_exact(call) for call in calls_of(stored)] == [_exact(call) for call in calls_of(given)]
    )


def loose_tool_call(stored: Message, given: Message) -> bool:
    """As strict, but arguments of tool calls are compared as JSON, ids not at all, and thoughts may be left out.

    >>> call = lambda text: {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    >>> loose_tool_call(call('{"a":1}'), call('{ "a": 1 }'))
    True
    """
    thought = given.get("reasoning_content")
    return (
        role_content_only(stored, given)
        and (stored.get("name") or None) == (given.get("name") or None)
        and (not thought or thought == stored.get("reasoning_content"))
        and [_meant(call) for call in calls_of(stored)] == [_meant(call) for call in calls_of(given)]
    )


def role_content_only(stored: Message, given: Message) -> bool:
    """The same role says the same, with the same media; calls, ids and thoughts are not looked at."""
    return stored.get("role") == given.get("role") and said_in(stored) == said_in(given)


MATCHES: Mapping[str, Match] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def match_named(name: str) -> Match:
    """A built-in match by its name."""
    if name not in MATCHES:
        raise UsageError(f"There is no session match {name!r}; choose one of {', '.join(MATCHES)}, or give a function.")
    return MATCHES[name]


def _said(message: Message) -> tuple[str | None, ...]:
    return tuple(message.get(name) or None for name in ("name", "tool_call_id", "reasoning_content"))


def _exact(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = function_of(call)
    return call.get("id") or None, function.get("name"), _text(function.get("arguments"))


def _meant(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return function.get("name"), {} if arguments is None else arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Found:
    """How far a request replays: through ``reply`` (None: not at all), which is its first ``taken`` messages.

    ``question`` is a stored question behind it that is all the rest of the request, if there is one.
    """

    reply: Node | None
    taken: int
    question: Node | None


def longest(tree: Tree, messages: Sequence[Message], match: Match, *, frame: str, words: str) -> Found:
    """The longest conversation under ``frame`` that the request replays.

    Of several as long: one that can go on, then one that is replayed to the letter, then the youngest.
    """
    ends = list(_ends(tree, messages, match, frame))
    best = max(ends, key=lambda end: (end[1], not end[0].is_cut, end[2], end[0].number), default=None)
    reply, taken = (None, 0) if best is None else best[:2]
    rest = messages[taken:]
    behind = [root for root in tree.roots if root.frame == frame] if reply is None else tree.children(reply.number)
    same = (q for q in behind if q.words == words and len(q.messages) == len(rest) and _all(q, rest, match))
    return Found(reply, taken, next(same, None))


def _ends(tree: Tree, messages: Sequence[Message], match: Match, frame: str) -> Iterator[tuple[Node, int, bool]]:
    """Every stored reply the request replays: with how many messages, and whether to the letter."""
    waiting = [(root, 0, True) for root in tree.roots if root.frame == frame]
    while waiting:
        node, start, exact = waiting.pop()
        stop = start + len(node.messages)
        given = messages[start:stop]
        if len(given) < len(node.messages) or not _all(node, given, match):
            continue
        exact = exact and _all(node, given, strict)
        if node.is_reply:
            yield node, stop, exact
        waiting.extend((child, stop, exact) for child in tree.children(node.number))


def _all(node: Node, given: Sequence[Message], match: Match) -> bool:
    return all(match(a, b) for a, b in zip(node.messages, given, strict=True))
