"""From a prompt to the tokens the policy is asked to continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.core.errors import DataError
from miles.core.protocols import Tokenizer
from miles.core.types import EMPTY, Prompt, Tokens

_REMEMBERED = 64
"""Attempts at one prompt start together, so a few renderings are enough to render each prompt once."""


class Renderer:
    """Renders with the chat template, or encodes the text as it is; no special token is added to text."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, template: Mapping[str, Any] = EMPTY) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._template = template
        self._recent: OrderedDict[int, tuple[Sequence[Any], Tokens]] = OrderedDict()

    def __call__(self, prompt: Prompt) -> Tokens:
        """The prompt's tokens. The same array may be given again, and must not be written to."""
        key = id(prompt.messages)  # kept alive below, so that no other messages can have this id
        if key not in self._recent:
            self._recent[key] = prompt.messages, self._render(prompt)
            if len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
        return self._recent[key][1]

    def _render(self, prompt: Prompt) -> Tokens:
        if self._chat:
            ids = self._tokenizer.render(prompt.messages, add_generation_prompt=True, **self._template)
        else:
            ids = self._tokenizer.encode(plain_text(prompt))
        if not ids:
            raise DataError(f"Prompt {prompt.id} renders to no token at all; remove it from the data or give it text.")
        tokens = np.array(ids, np.int32)
        tokens.flags.writeable = False
        return tokens


def plain_text(prompt: Prompt) -> str:
    """The text of a prompt that is a single message of text."""
    content = prompt.messages[0]["content"]
    if len(prompt.messages) > 1 or not isinstance(content, str):
        raise DataError(f"Prompt {prompt.id} is a conversation; render it with --apply-chat-template.")
    return content
