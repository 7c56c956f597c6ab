"""When a message replays another."""

from __future__ import annotations

from typing import Any

import pytest

from miles.hooks.load import check_signature
from miles.rollout.session.branches import SamplePicker
from miles.rollout.session.match import (
    MessageMatcher,
    loose_tool_call,
    role_content_only,
    strict,
)


def called(arguments: Any = '{"a": 1}', *, id: str = "x", name: str = "f", **rest: Any) -> dict[str, Any]:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **rest}


@pytest.mark.parametrize(
    ("stored", "given", "by"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a"}, {"strict", "loose", "role"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, set()),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}, set()),
        (
            {"role": "user", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"strict", "loose", "role"},
        ),
        (called(), called(content=None), {"strict", "loose", "role"}),
        (called(), called(id="y"), {"loose", "role"}),
        (called(), called('{"a":1}'), {"loose", "role"}),
        (called(), called({"a": 1}), {"strict", "loose", "role"}),
        (called(), called('{"a": 2}'), {"role"}),
        (called(), called(name="g"), {"role"}),
        (called("not JSON"), called(" not JSON"), {"loose", "role"}),
        (called(reasoning_content="hm"), called(), {"loose", "role"}),
        (called(reasoning_content="hm"), called(reasoning_content="no"), {"role"}),
        (
            {"role": "tool", "content": "1", "tool_call_id": "x"},
            {"role": "tool", "content": "1", "tool_call_id": "y"},
            {"loose", "role"},
        ),
    ],
)
def test_each_match_overlooks_what_it_says(stored: Any, given: Any, by: set[str]) -> None:
    matches = {"strict": strict, "loose": loose_tool_call, "role": role_content_only}
    assert {name for name, match in matches.items() if match(stored, given)} == by


def test_the_order_of_text_and_media_matters() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    text = {"type": "text", "text": "a"}
    one, other = ({"role": "user", "content": parts} for parts in ([text, image], [image, text]))
    assert not role_content_only(one, other)


def test_both_hooks_can_be_replaced() -> None:
    check_signature(lambda stored, given: True, MessageMatcher, "mine")
    check_signature(lambda conversations: conversations[-1:], SamplePicker, "mine")
