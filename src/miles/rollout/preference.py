"""Pairs of replies in the place of attempts, for training on preferences (see core.protocols.Rollout).

Both replies were given, not sampled: each is a span in the policy's place, as a demonstration is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Group, Prompt, Reward, Status, Tokens, Trajectory
from miles.rollout.supervise import Branch, Supervised

PREFERENCE = "preference"
"""Where a prompt's metadata has the pair: an assistant's message under each of ``SIDES``."""
SIDES = ("chosen", "rejected")

Message = Mapping[str, Any]


def pair_of(
    where: str,
    asked: Sequence[Message],
    *,
    chosen: tuple[str, str | Sequence[Message]],
    rejected: tuple[str, str | Sequence[Message]],
) -> dict[str, Message]:
    """The two replies to ``asked`` as assistant messages, from (column, reply); ``where`` is named when one is bad.

    A reply is text, the assistant's one message, or the whole conversation that ends with it.
    """
    pair = {
        side: _reply(where, column, asked, said) for side, (column, said) in zip(SIDES, (chosen, rejected), strict=True)
    }
    if pair["chosen"] == pair["rejected"]:
        raise DataError(
            f"{where}: {chosen[0]} and {rejected[0]} are the same, and neither can be preferred; take the row out, or "
            "leave such rows out with --skip-bad-rows."
        )
    return pair


def _reply(where: str, column: str, asked: Sequence[Message], said: str | Sequence[Message]) -> Message:
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    messages = list(said)
    if len(messages) > len(asked) and messages[: len(asked)] == list(asked):
        messages = messages[len(asked) :]
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise DataError(
            f"{where}: {column} must be text, one message of the assistant's, or the conversation of the prompt and "
            "that message."
        )
    return messages[0]


class Preferred:
    """Gives each prompt's own two replies, the chosen one first, rendered as ``shown`` renders a last message."""

    def __init__(self, shown: Supervised, *, chat: bool) -> None:
        self._shown = shown
        self._chat = chat

    async def produce(self, prompt: Prompt) -> Group:
        pair = self.branches(prompt)
        if pair[0][-1].tokens.tolist() == pair[1][-1].tokens.tolist():
            raise DataError(f"The two replies to prompt {prompt.id} have the same tokens; take its row out.")
        trajectories = tuple(
            Trajectory(
                branches=(branch,),
                status=Status.COMPLETED,
                reward=Reward(value=float(side == "chosen")),
                index=index,
                metadata={PREFERENCE: side},
            )
            for index, (side, branch) in enumerate(zip(SIDES, pair, strict=True))
        )
        return Group(prompt=prompt, trajectories=trajectories)

    def branches(self, prompt: Prompt) -> list[Branch]:
        """The question and the reply as spans, for the chosen and for the rejected one."""
        return [self._shown.branches(self._as_shown(prompt, side))[0] for side in SIDES]

    def tokens(self, prompt: Prompt) -> Tokens:
        """The longer of the two conversations, to measure."""
        return max((self._shown.tokens(self._as_shown(prompt, side)) for side in SIDES), key=len)

    def _as_shown(self, prompt: Prompt, side: str) -> Prompt:
        """The prompt with one of its replies as its demonstration."""
        reply: Message = prompt.metadata[PREFERENCE][side]
        if self._chat:
            return replace(prompt, messages=(*prompt.messages, reply))
        if not isinstance(reply.get("content"), str):
            raise DataError(f"The {side} reply to prompt {prompt.id} is not text; add --apply-chat-template.")
        return replace(prompt, label=reply["content"])
