"""Renderer detection: the renderer of a tokenizer's chat template, from what it renders of a small conversation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from miles.core.errors import MilesError, UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.serving.messages import Message, format_tool_call
from miles.rollout.serving.tool_parsers import detect_tool_parser
from miles.rollout.session.fallback_renderer import WARNING, FallbackRenderer
from miles.rollout.session.families import FAMILIES
from miles.rollout.session.render import ChatRenderer, ConversationState
from miles.rollout.session.template import TemplateRenderer

_QUESTION: Message = {"role": "user", "content": "q"}
_ANSWER: Message = {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}],
}
_CALL_WITH_TEXT_ARGUMENTS: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [format_tool_call("call_0", "f", '{"x": "y"}')],
}


def build_renderer(
    tokenizer: Tokenizer, *, family: str | None = None, template: Mapping[str, Any] | None = None
) -> ChatRenderer:
    """The renderer of ``family``, or of the family the template is recognised as; else a fallback with a warning.

    ``template`` are arguments passed to the chat template every time.
    """
    probes = _render_probes(tokenizer, template or {})
    tool_parser = detect_tool_parser(probes)
    if family is not None:
        families = {known.name: known for known in FAMILIES}
        if family not in families:
            choices = ", ".join(families)
            raise UsageError(f"There is no session family {family!r}; choose one of {choices}, or leave it out.")
        return TemplateRenderer(tokenizer, families[family], tool_parser=tool_parser, template=template)
    for known in FAMILIES:
        if not all(sign in probes for sign in known.template_signs):
            continue
        try:  # the family fits if the template's turns can be cut as the family's are
            renderer = TemplateRenderer(tokenizer, known, tool_parser=tool_parser, template=template)
            state = ConversationState(messages=(_QUESTION, _ANSWER), sampled=np.zeros(0, np.int32))
            renderer.render_continuation(state, [_QUESTION], ())
        except MilesError:
            continue
        return renderer
    warnings.warn(WARNING, stacklevel=2)
    return FallbackRenderer(tokenizer, tool_parser=tool_parser, template=template)


def _render_probes(tokenizer: Tokenizer, template: Mapping[str, Any]) -> str:
    texts = [tokenizer.render_chat_text([_QUESTION], **{**template, "add_generation_prompt": True})]
    for message in (_ANSWER, _CALL, _CALL_WITH_TEXT_ARGUMENTS):
        try:
            texts.append(
                tokenizer.render_chat_text([_QUESTION, message], **{**template, "add_generation_prompt": False})
            )
        except (MilesError, TypeError, ValueError, AttributeError, KeyError):
            continue  # a template may not support calls, or want their arguments in the other form
    return "".join(texts)
