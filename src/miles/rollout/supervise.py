"""Demonstrations in the place of attempts, for supervised fine-tuning (see core.protocols.Rollout).

The tokens to learn are an ENV span: they were given, not sampled, so they carry no log-prob and no version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.core.errors import DataError
from miles.core.protocols import Tokenizer
from miles.core.types import EMPTY, Author, Group, Prompt, Reward, Span, Status, Tokens, Trajectory
from miles.rollout.render import Renderer


class Supervised:
    """Gives each prompt's own demonstration, ended by an end-of-sequence token.

    In a conversation whose last message is the assistant's, that message is the demonstration;
    otherwise the label is. Earlier assistant messages are context and are not learned.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Sequence[int], chat: bool, template: Mapping[str, Any] = EMPTY
    ) -> None:
        assert eos_token_ids, "a demonstration must be able to end"
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._chat = chat
        self._template = template
        self._as_text = Renderer(tokenizer, chat=False)

    async def produce(self, prompt: Prompt) -> Group:
        asked, shown = self.split(prompt)
        spans = (Span(author=Author.PROMPT, tokens=asked), Span(author=Author.ENV, tokens=shown))
        trajectory = Trajectory(branches=(spans,), status=Status.COMPLETED, reward=Reward(value=0.0))
        return Group(prompt=prompt, trajectories=(trajectory,))

    def split(self, prompt: Prompt) -> tuple[Tokens, Tokens]:
        """The tokens of the question and those of the demonstration."""
        return self._split_chat(prompt) if self._chat else self._split_text(prompt)

    def tokens(self, prompt: Prompt) -> Tokens:
        """Question and demonstration in one, to measure or to show."""
        return np.concatenate(self.split(prompt))

    def _split_text(self, prompt: Prompt) -> tuple[Tokens, Tokens]:
        if prompt.label is None:
            raise DataError(f"Prompt {prompt.id} has no demonstration; name its column with --label-key.")
        return self._as_text(prompt), self._ended(self._tokenizer.encode(prompt.label))

    def _split_chat(self, prompt: Prompt) -> tuple[Tokens, Tokens]:
        messages = list(prompt.messages)
        if messages[-1]["role"] != "assistant":
            if prompt.label is None:
                raise DataError(
                    f"Prompt {prompt.id} has no demonstration; end its messages with one of the assistant's, or name "
                    "a column with --label-key."
                )
            messages.append({"role": "assistant", "content": prompt.label})
        if len(messages) < 2:
            raise DataError(f"Prompt {prompt.id} has a demonstration but no question; put a message before it.")
        asked = self._tokenizer.render(messages[:-1], add_generation_prompt=True, **self._template)
        whole = self._tokenizer.render(messages, add_generation_prompt=False, **self._template)
        if whole[: len(asked)] != asked:
            raise DataError(
                f"The chat template does not render prompt {prompt.id} as its question followed by its demonstration, "
                "so the two cannot be told apart; use a template that only appends."
            )
        return np.array(asked, np.int32), self._ended(whole[len(asked) :])

    def _ended(self, shown: Sequence[int]) -> Tokens:
        """Cut what a template writes after the last end-of-sequence token; a policy stops there."""
        last = max((at for at, token in enumerate(shown) if token in self._eos), default=None)
        ended = [*shown, self._eos[0]] if last is None else shown[: last + 1]
        return np.array(ended, np.int32)
