"""Prompt template: a system message and a text around each question, applied to the prompts of a dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt
from miles.rollout.data.dataset import Dataset

PLACEHOLDER = "{prompt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """``system``: the message for prompts without one. ``text`` replaces the last user message, which it contains.

    >>> PromptTemplate(text="{prompt} Answer briefly.").apply(({"role": "user", "content": "Why?"},), "row 0")
    ({'role': 'user', 'content': 'Why? Answer briefly.'},)
    """

    system: str | None = None
    text: str | None = None

    def apply(self, messages: tuple[Any, ...], where: str) -> tuple[Any, ...]:
        """The messages with template and system message; raises where there is no text to put into the template."""
        if self.text is not None:
            messages = _fill_last_user_message(messages, self.text, where)
        if self.system is not None and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system}, *messages)
        return messages


def apply_prompt_template(dataset: Dataset, template: PromptTemplate) -> Dataset:
    """The dataset with every prompt in the template."""
    if template == PromptTemplate():
        return dataset

    def apply(prompt: Prompt) -> Prompt:
        return replace(prompt, messages=template.apply(tuple(prompt.messages), f"{dataset.path}, row {prompt.id}"))

    return replace(dataset, prompts=tuple(map(apply, dataset.prompts)))


def _fill_last_user_message(messages: tuple[Any, ...], text: str, where: str) -> tuple[Any, ...]:
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    content = None if last is None else messages[last].get("content")
    if last is None or not isinstance(content, str | list):
        raise DataError(f"{where}: --prompt-template needs a user message with text, which this prompt lacks.")
    filled = {**messages[last], "content": _fill(text, content)}
    return (*messages[:last], filled, *messages[last + 1 :])


def _fill(text: str, content: str | list[Any]) -> str | list[Any]:
    """The template with the content in it; content with images stays a list of parts."""
    if isinstance(content, str):
        return text.replace(PLACEHOLDER, content)
    pieces = text.split(PLACEHOLDER)
    parts: list[Any] = []
    for number, piece in enumerate(pieces):
        parts += ([{"type": "text", "text": piece}] if piece else []) + (content if number + 1 < len(pieces) else [])
    return parts
