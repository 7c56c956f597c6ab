"""Message matching: whether a message replays a stored one, and how far a request replays the conversation tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles.rollout.serving.messages import Message, get_function, get_tool_calls, normalize_content
from miles.rollout.session.tree import ConversationNode, ConversationTree


class MessageMatcher(Protocol):
    """Whether ``given``, from a request, replays ``stored``."""

    def __call__(self, stored: Message, given: Message) -> bool: ...


def strict(stored: Message, given: Message) -> bool:
    """Everything a model may see is equal; None, "" and absent are the same, and so are a text and its parts.

    >>> strict({"role": "assistant", "content": None}, {"role": "assistant", "content": ""})
    True
    """
    return (
        role_content_only(stored, given)
        and all(
            (stored.get(name) or None) == (given.get(name) or None)
            for name in ("name", "tool_call_id", "reasoning_content")
        )
        and list(map(_exact_call, get_tool_calls(stored))) == list(map(_exact_call, get_tool_calls(given)))
    )


def loose_tool_call(stored: Message, given: Message) -> bool:
    """As strict, but tool-call arguments are compared as JSON, ids are ignored, and reasoning may be left out.

    >>> call = lambda text: {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    >>> loose_tool_call(call('{"a":1}'), call('{ "a": 1 }'))
    True
    """
    reasoning = given.get("reasoning_content")
    return (
        role_content_only(stored, given)
        and (stored.get("name") or None) == (given.get("name") or None)
        and (not reasoning or reasoning == stored.get("reasoning_content"))
        and list(map(_parsed_call, get_tool_calls(stored))) == list(map(_parsed_call, get_tool_calls(given)))
    )


def role_content_only(stored: Message, given: Message) -> bool:
    """The same role, text and media; calls, ids and reasoning are ignored."""
    return stored.get("role") == given.get("role") and normalize_content(stored) == normalize_content(given)


MATCHERS: Mapping[str, MessageMatcher] = {
    "strict": strict,
    "loose_tool_call": loose_tool_call,
    "role_content_only": role_content_only,
}


def _exact_call(call: Mapping[str, Any]) -> tuple[Any, ...]:
    function = get_function(call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return call.get("id") or None, function.get("name"), text


def _parsed_call(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = get_function(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return function.get("name"), {} if arguments is None else arguments


@dataclass(frozen=True, slots=True)
class ReplayMatch:
    """How far a request replays: through ``reply`` (None: not at all), which covers its first ``num_messages``.

    ``question`` is the stored question after it that equals the rest of the request, if there is one.
    """

    reply: ConversationNode | None
    num_messages: int
    question: ConversationNode | None


def find_longest_match(
    tree: ConversationTree, messages: Sequence[Message], match: MessageMatcher, *, frame: str, key: str
) -> ReplayMatch:
    """The longest conversation under ``frame`` that the request replays.

    Of several equally long: one that can be continued, then one replayed exactly, then the newest.
    """
    replays = list(_find_replays(tree, messages, match, frame))
    best = max(
        replays, key=lambda found: (found[1], not found[0].is_truncated, found[2], found[0].number), default=None
    )
    reply, num_messages = (None, 0) if best is None else best[:2]
    rest = messages[num_messages:]
    if reply is None:
        questions = [root for root in tree.roots if root.frame == frame]
    else:
        questions = tree.get_children(reply.number)
    for question in questions:
        if question.key == key and len(question.messages) == len(rest) and _matches(question, rest, match):
            return ReplayMatch(reply, num_messages, question)
    return ReplayMatch(reply, num_messages, None)


def _find_replays(
    tree: ConversationTree, messages: Sequence[Message], match: MessageMatcher, frame: str
) -> Iterator[tuple[ConversationNode, int, bool]]:
    """Every stored reply the request replays, with how many messages it covers and whether exactly."""
    pending = [(root, 0, True) for root in tree.roots if root.frame == frame]
    while pending:
        node, start, exact = pending.pop()
        stop = start + len(node.messages)
        given = messages[start:stop]
        if len(given) < len(node.messages) or not _matches(node, given, match):
            continue
        exact = exact and _matches(node, given, strict)
        if node.is_reply:
            yield node, stop, exact
        pending.extend((child, stop, exact) for child in tree.get_children(node.number))


def _matches(node: ConversationNode, given: Sequence[Message], match: MessageMatcher) -> bool:
    return all(match(stored, message) for stored, message in zip(node.messages, given, strict=True))
