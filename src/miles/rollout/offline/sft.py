"""Supervised fine-tuning (SFT) demonstrations as a Rollout (see core.protocols.Rollout).

Trained tokens are POLICY spans, since the data wrote them in the policy's place; their version is ``DEMONSTRATION``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from miles.core.errors import DataError
from miles.core.protocols import ImageTokenizer, Tokenizer
from miles.core.types import DEMONSTRATION, EMPTY, Author, Group, Prompt, Reward, Span, Status, Tokens, Trajectory
from miles.rollout.offline.assistant_mask import (
    AmbiguousTurns,
    AssistantMasker,
    MaskedConversation,
    Message,
    expand_images,
    is_trained_message,
)
from miles.rollout.prompt_renderer import PromptRenderer

LossMaskType = Literal["all", "last", "each"]
Branch = tuple[Span, ...]


class SFTRollout:
    """Returns each prompt's demonstration, ended by an end-of-sequence token.

    Of a conversation, ``loss_mask_type`` trains on ``all`` assistant turns, the ``last`` message alone, or ``each``
    turn in a branch of its own, with its context. A label is the assistant message where the conversation
    does not end with one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        chat: bool,
        template: Mapping[str, Any] = EMPTY,
        loss_mask_type: LossMaskType = "all",
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._chat = chat
        self._loss_mask_type = loss_mask_type
        self._masker = AssistantMasker(tokenizer, eos_token_ids=eos_token_ids, template=template)
        self._render_text = PromptRenderer(tokenizer, chat=False)

    async def produce(self, prompt: Prompt) -> Group:
        await self.prepare(prompt)
        branches = self.branches(prompt)
        trajectory = Trajectory(branches=branches, status=Status.COMPLETED, reward=Reward(value=0.0))
        return Group(prompt=prompt, trajectories=(trajectory,))

    async def prepare(self, prompt: Prompt) -> None:
        """Process the images of a prompt off the event loop."""
        if isinstance(self._tokenizer, ImageTokenizer):
            await self._tokenizer.prepare(prompt.messages)

    def branches(self, prompt: Prompt) -> tuple[Branch, ...]:
        """The demonstration as spans."""
        conversations = self._mask_chat(prompt) if self._chat else [self._mask_text(prompt)]
        return tuple(build_spans(conversation) for conversation in conversations)

    def tokens(self, prompt: Prompt) -> Tokens:
        """Tokens of prompt and demonstration; of the longest branch where there are several."""
        longest = max(self.branches(prompt), key=lambda branch: sum(map(len, branch)))
        return np.concatenate([span.tokens for span in longest])

    def _mask_text(self, prompt: Prompt) -> MaskedConversation:
        if prompt.label is None:
            raise DataError(f"Prompt {prompt.id} has no demonstration; name its column with --label-key.")
        prompt_tokens, demonstration = self._render_text(prompt).tolist(), self._tokenizer.encode(prompt.label)
        last = max((at for at, token in enumerate(demonstration) if token in self._eos), default=None)
        demonstration = [*demonstration, self._eos[0]] if last is None else demonstration[: last + 1]
        return MaskedConversation(
            tokens=(*prompt_tokens, *demonstration),
            runs=((len(prompt_tokens), len(prompt_tokens) + len(demonstration)),),
        )

    def _mask_chat(self, prompt: Prompt) -> list[MaskedConversation]:
        messages = _with_label(prompt)
        wanted = self._select_turns(prompt, messages)
        try:
            if self._loss_mask_type == "all":
                found = [self._masker.all(messages, wanted)]
            else:
                found = [self._masker.last(messages[: at + 1]) for at in wanted]
        except AmbiguousTurns as error:
            raise self._ambiguity_error(prompt, messages, error) from error
        try:
            return [expand_images(conversation, self._tokenizer, messages) for conversation in found]
        except DataError as error:
            raise DataError(f"Prompt {prompt.id}: {error}") from error

    def _select_turns(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        """Indices of the messages to train on; a first message has no prompt, so it is not trained on."""
        assistant_turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not assistant_turns or (self._loss_mask_type == "last" and assistant_turns[-1] != len(messages) - 1):
            raise DataError(
                f"Prompt {prompt.id} has no demonstration; end its messages with conversation of the assistant's, or "
                f"name "
                "a column with --label-key."
            )
        if assistant_turns == [0]:
            raise DataError(f"Prompt {prompt.id} has a demonstration but no question; put a message before it.")
        trained = [
            at for at, message in enumerate(messages) if is_trained_message(f"Prompt {prompt.id}", message) and at
        ]
        wanted = [at for at in trained if at == assistant_turns[-1]] if self._loss_mask_type == "last" else trained
        if not wanted:
            raise DataError(
                f"Prompt {prompt.id} has nothing to train on: its fields exclude every turn; remove the row."
            )
        return wanted

    def _ambiguity_error(self, prompt: Prompt, messages: Sequence[Message], error: AmbiguousTurns) -> DataError:
        if self._loss_mask_type == "all" and sum(message["role"] == "assistant" for message in messages) > 1:
            return DataError(
                f"The chat template does not show where the turns of prompt {prompt.id} begin and end: {error}; train "
                f"on "
                "each in a row of its own with --loss-mask-type each, or the last alone with "
                "--loss-mask-type last."
            )
        return DataError(
            f"The chat template does not render prompt {prompt.id} as its question followed by its demonstration, "
            "so the two cannot be separated; use a template that only appends."
        )


def build_spans(conversation: MaskedConversation) -> Branch:
    """Build spans: POLICY for the trained ranges, PROMPT before the first, ENV between them."""
    spans: list[Span] = []
    done = 0
    for start, stop in conversation.runs:
        if start > done:
            author = Author.ENV if spans else Author.PROMPT
            tokens = np.array(conversation.tokens[done:start], np.int32)
            images = tuple(placed.shift(-done) for placed in conversation.images if done <= placed.start < start)
            spans.append(Span(author=author, tokens=tokens, images=images))
        tokens = np.array(conversation.tokens[start:stop], np.int32)
        zero_logprobs = np.zeros(len(tokens), np.float32)
        spans.append(Span(author=Author.POLICY, tokens=tokens, logprobs=zero_logprobs, version=DEMONSTRATION))
        done = stop
    return tuple(spans)


def _with_label(prompt: Prompt) -> list[Message]:
    messages: list[Message] = list(prompt.messages)
    if messages[-1]["role"] != "assistant" and prompt.label is not None:
        messages.append({"role": "assistant", "content": prompt.label})
    return messages
