"""Demonstrations in the place of attempts, for supervised fine-tuning (see core.protocols.Rollout).

What is learned is a POLICY span, for the data wrote it in the policy's place; its version is ``GIVEN``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from miles.core.errors import DataError
from miles.core.protocols import Tokenizer
from miles.core.types import EMPTY, GIVEN, Author, Group, Prompt, Reward, Span, Status, Tokens, Trajectory
from miles.rollout.render import Renderer
from miles.rollout.turns import Message, Taught, Turns, Unclear, is_learned

Learned = Literal["all", "last", "each"]
Branch = tuple[Span, ...]


class Supervised:
    """Gives each prompt's own demonstration, ended by an end-of-sequence token.

    Of a conversation ``learned`` are ``all`` of the assistant's turns, the ``last`` message alone, or ``each`` turn
    in a branch of its own, in the context it was given in. A label stands in for an assistant's message where the
    conversation does not end with one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        chat: bool,
        template: Mapping[str, Any] = EMPTY,
        learned: Learned = "all",
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._chat = chat
        self._learned = learned
        self._turns = Turns(tokenizer, eos_token_ids=eos_token_ids, template=template)
        self._as_text = Renderer(tokenizer, chat=False)

    async def produce(self, prompt: Prompt) -> Group:
        branches = self.branches(prompt)
        trajectory = Trajectory(branches=branches, status=Status.COMPLETED, reward=Reward(value=0.0))
        return Group(prompt=prompt, trajectories=(trajectory,))

    def branches(self, prompt: Prompt) -> tuple[Branch, ...]:
        """The demonstration as spans."""
        taught = self._of_chat(prompt) if self._chat else [self._of_text(prompt)]
        return tuple(spans_of(one) for one in taught)

    def tokens(self, prompt: Prompt) -> Tokens:
        """Question and demonstration in one, to measure or to show; the longest branch where there are several."""
        longest = max(self.branches(prompt), key=lambda branch: sum(map(len, branch)))
        return np.concatenate([span.tokens for span in longest])

    def _of_text(self, prompt: Prompt) -> Taught:
        if prompt.label is None:
            raise DataError(f"Prompt {prompt.id} has no demonstration; name its column with --label-key.")
        asked, shown = self._as_text(prompt).tolist(), self._tokenizer.encode(prompt.label)
        last = max((at for at, token in enumerate(shown) if token in self._eos), default=None)
        shown = [*shown, self._eos[0]] if last is None else shown[: last + 1]
        return Taught(tokens=(*asked, *shown), runs=((len(asked), len(asked) + len(shown)),))

    def _of_chat(self, prompt: Prompt) -> list[Taught]:
        messages = _with_label(prompt)
        wanted = self._wanted(prompt, messages)
        try:
            if self._learned == "all":
                return [self._turns.all(messages, wanted)]
            return [self._turns.last(messages[: at + 1]) for at in wanted]
        except Unclear as error:
            raise self._unclear(prompt, messages, error) from error

    def _wanted(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages to learn; nothing asked for a first one."""
        own = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not own or (self._learned == "last" and own[-1] != len(messages) - 1):
            raise DataError(
                f"Prompt {prompt.id} has no demonstration; end its messages with one of the assistant's, or name "
                "a column with --label-key."
            )
        if own == [0]:
            raise DataError(f"Prompt {prompt.id} has a demonstration but no question; put a message before it.")
        kept = [at for at, message in enumerate(messages) if is_learned(f"Prompt {prompt.id}", message) and at]
        wanted = [at for at in kept if at == own[-1]] if self._learned == "last" else kept
        if not wanted:
            raise DataError(
                f"Prompt {prompt.id} leaves nothing to learn: its fields take out every turn; take the row out."
            )
        return wanted

    def _unclear(self, prompt: Prompt, messages: Sequence[Message], error: Unclear) -> DataError:
        if self._learned == "all" and sum(message["role"] == "assistant" for message in messages) > 1:
            return DataError(
                f"The chat template does not let the turns of prompt {prompt.id} be told apart: {error}; learn each in "
                "a row of its own with --loss-mask-type each, or the last alone with --loss-mask-type last."
            )
        return DataError(
            f"The chat template does not render prompt {prompt.id} as its question followed by its demonstration, "
            "so the two cannot be told apart; use a template that only appends."
        )


def spans_of(taught: Taught) -> Branch:
    """The runs to learn as the policy's spans, what stands before as the prompt's, between them the environment's."""
    spans: list[Span] = []
    done = 0
    for start, stop in taught.runs:
        if start > done:
            author = Author.ENV if spans else Author.PROMPT
            spans.append(Span(author=author, tokens=np.array(taught.tokens[done:start], np.int32)))
        tokens = np.array(taught.tokens[start:stop], np.int32)
        certain = np.zeros(len(tokens), np.float32)
        spans.append(Span(author=Author.POLICY, tokens=tokens, logprobs=certain, version=GIVEN))
        done = stop
    return tuple(spans)


def _with_label(prompt: Prompt) -> list[Message]:
    messages: list[Message] = list(prompt.messages)
    if messages[-1]["role"] != "assistant" and prompt.label is not None:
        messages.append({"role": "assistant", "content": prompt.label})
    return messages
