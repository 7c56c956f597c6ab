"""Which renderer a tokenizer's chat template needs, told from what the template writes of a small conversation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from miles.core.errors import MilesError, UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.session.calls import FORMATS, Format
from miles.rollout.session.families.family import Family
from miles.rollout.session.families.table import FAMILIES
from miles.rollout.session.message import Message
from miles.rollout.session.render import Before, Renderer
from miles.rollout.session.template import TemplateRenderer
from miles.rollout.session.unknown import WARNING, ComparingRenderer

_SIGNS: Mapping[str, str] = {
    "qwen3_coder": "<function=",
    "glm": "<arg_key>",
    "minimax": "<minimax:tool_call>",
    "kimi": "<|tool_call_begin|>",
    "deepseek": "<｜tool▁call▁begin｜>",
    "mistral": "[TOOL_CALLS]",
    "qwen": "<tool_call>",
}
_ASKED: Message = {"role": "user", "content": "q"}
_SAID: Message = {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}],
}
_CALLED_IN_TEXT: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}],
}


def renderer_for(
    tokenizer: Tokenizer, *, family: str | None = None, template: Mapping[str, Any] | None = None
) -> Renderer:
    """The renderer of ``family``, or of the one the template's writing tells; where none fits, a checked best effort
    with a warning. ``template`` are words said to the chat template every time."""
    probes = _probes(tokenizer, template or {})
    calls = _format_in(probes)
    if family is not None:
        return TemplateRenderer(tokenizer, _named(family), calls=calls, template=template)
    for known in FAMILIES:
        if not all(sign in probes for sign in known.signs):
            continue
        renderer = _fitting(tokenizer, known, calls, template)
        if renderer is not None:
            return renderer
    warnings.warn(WARNING, stacklevel=2)
    return ComparingRenderer(tokenizer, calls=calls, template=template)


def _named(name: str) -> Family:
    known = {each.name: each for each in FAMILIES}
    if name not in known:
        raise UsageError(f"There is no session family {name!r}; choose one of {', '.join(known)}, or leave it out.")
    return known[name]


def _fitting(
    tokenizer: Tokenizer, family: Family, calls: Format | None, template: Mapping[str, Any] | None
) -> TemplateRenderer | None:
    """The family's renderer if the template's turns can be cut as the family's are."""
    try:
        renderer = TemplateRenderer(tokenizer, family, calls=calls, template=template)
        renderer.following(Before(messages=(_ASKED, _SAID), sampled=np.zeros(0, np.int32)), [_ASKED], ())
    except MilesError:
        return None
    return renderer


def _probes(tokenizer: Tokenizer, template: Mapping[str, Any]) -> str:
    asked = tokenizer.written([_ASKED], **{**template, "add_generation_prompt": True})
    said = (_tried(tokenizer, [_ASKED, message], template) for message in (_SAID, _CALLED, _CALLED_IN_TEXT))
    return "".join([asked, *said])


def _tried(tokenizer: Tokenizer, messages: list[Message], template: Mapping[str, Any]) -> str:
    try:
        return tokenizer.written(messages, **{**template, "add_generation_prompt": False})
    except (MilesError, TypeError, ValueError, AttributeError, KeyError):
        return ""  # a template may know no calls, or want their arguments the other way


def _format_in(probes: str) -> Format | None:
    return next((FORMATS[name] for name, sign in _SIGNS.items() if sign in probes), None)
