"""Prompt rendering: the chat template or plain text, as the tokens the policy continues, with images among them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from miles.core.errors import DataError
from miles.core.media import Images
from miles.core.protocols import ImageTokenizer, Tokenizer
from miles.core.types import EMPTY, Prompt, Tokens
from miles.rollout.data.schema import TOOLS
from miles.rollout.images import encode_chat

_CACHE_SIZE = 64
"""Trajectories of one prompt start together, so a small cache renders each prompt once."""


class RenderedPrompt(NamedTuple):
    """A prompt's tokens, shared and read-only, and its images among them."""

    tokens: Tokens
    images: Images = ()


class PromptRenderer:
    """Applies the chat template, with a prompt's ``tools`` if asked, or encodes text without special tokens."""

    def __init__(
        self, tokenizer: Tokenizer, *, chat: bool, template: Mapping[str, Any] = EMPTY, tools: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        # Decided once: comparing an object with a protocol takes longer than rendering a short prompt.
        self._image_tokenizer = tokenizer if isinstance(tokenizer, ImageTokenizer) else None
        self._chat = chat
        self._template = template
        self._tools = tools
        self._cache: OrderedDict[int, tuple[Sequence[Any], RenderedPrompt]] = OrderedDict()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that it renders with."""
        return self._tokenizer

    def __call__(self, prompt: Prompt) -> Tokens:
        """The prompt's tokens. The array is shared and read-only."""
        return self.render(prompt).tokens

    def render(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt's tokens and images; images that are not processed yet are processed now."""
        key = id(prompt.messages)  # kept alive below, so that the id stays unique
        if key not in self._cache:
            self._cache[key] = prompt.messages, self._render(prompt)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return self._cache[key][1]

    async def load_images(self, prompt: Prompt) -> Images:
        """The prompt's images, processed off the event loop."""
        if self._image_tokenizer is not None:
            await self._image_tokenizer.prepare(prompt.messages)
        return self.render(prompt).images

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        images: Images = ()
        if self._chat:
            tools = {TOOLS: prompt.metadata[TOOLS]} if self._tools and TOOLS in prompt.metadata else {}
            template = {**self._template, **tools}
            text = self._tokenizer.render_chat_text(prompt.messages, add_generation_prompt=True, **template)
            try:
                ids, images = encode_chat(self._tokenizer, text, prompt.messages)
            except DataError as error:
                raise DataError(f"Prompt {prompt.id}: {error}") from error
        else:
            ids = self._tokenizer.encode(get_plain_text(prompt))
        if not ids:
            raise DataError(f"Prompt {prompt.id} renders to no token at all; remove it from the data or give it text.")
        tokens = np.array(ids, np.int32)
        tokens.flags.writeable = False
        return RenderedPrompt(tokens, images)


def get_plain_text(prompt: Prompt) -> str:
    """The text of a prompt that is a single text message."""
    content = prompt.messages[0]["content"]
    if len(prompt.messages) > 1 or not isinstance(content, str):
        raise DataError(f"Prompt {prompt.id} is a conversation; render it with --apply-chat-template.")
    return content
