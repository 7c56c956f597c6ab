"""Preference pairs (DPO, reward models) as a Rollout: the chosen and the rejected reply form a group.

Both replies come from the data, not from sampling: each is a policy span, as a demonstration is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Group, Prompt, Reward, Status, Tokens, Trajectory
from miles.rollout.offline.sft import Branch, SFTRollout

PREFERENCE = "preference"
"""Metadata key with a prompt's pair: an assistant message under each of ``SIDES``."""
SIDES = ("chosen", "rejected")

Message = Mapping[str, Any]


def build_preference_pair(
    where: str,
    prompt_messages: Sequence[Message],
    *,
    chosen: tuple[str, str | Sequence[Message]],
    rejected: tuple[str, str | Sequence[Message]],
) -> dict[str, Message]:
    """Build the two replies to a prompt as assistant messages, from (column, reply); ``where`` locates errors.

    A reply is text, one assistant message, or the whole conversation that ends with it.
    """
    pair = {
        side: _parse_reply(where, column, prompt_messages, reply)
        for side, (column, reply) in zip(SIDES, (chosen, rejected), strict=True)
    }
    if pair["chosen"] == pair["rejected"]:
        raise DataError(
            f"{where}: {chosen[0]} and {rejected[0]} are the same, and neither can be preferred; remove the row, or "
            "leave such rows out with --skip-bad-rows."
        )
    return pair


def _parse_reply(
    where: str, column: str, prompt_messages: Sequence[Message], reply: str | Sequence[Message]
) -> Message:
    if isinstance(reply, str):
        return {"role": "assistant", "content": reply}
    messages = list(reply)
    if len(messages) > len(prompt_messages) and messages[: len(prompt_messages)] == list(prompt_messages):
        messages = messages[len(prompt_messages) :]
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise DataError(
            f"{where}: {column} must be text, one assistant message, or the prompt's conversation followed by "
            "that message."
        )
    return messages[0]


class PreferenceRollout:
    """Returns each prompt's two replies, the chosen one first, rendered by ``sft`` as a last message."""

    def __init__(self, sft: SFTRollout, *, chat: bool) -> None:
        self._sft = sft
        self._chat = chat

    async def produce(self, prompt: Prompt) -> Group:
        await self._sft.prepare(prompt)
        pair = self.branches(prompt)
        if pair[0][-1].tokens.tolist() == pair[1][-1].tokens.tolist():
            raise DataError(f"The two replies to prompt {prompt.id} have the same tokens; remove its row.")
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
        """The prompt and the reply as spans, for the chosen and the rejected one."""
        return [self._sft.branches(self._with_reply(prompt, side))[0] for side in SIDES]

    def tokens(self, prompt: Prompt) -> Tokens:
        """The tokens of the longer conversation, to measure its length."""
        return max((self._sft.tokens(self._with_reply(prompt, side)) for side in SIDES), key=len)

    def _with_reply(self, prompt: Prompt, side: str) -> Prompt:
        """The prompt with one of its replies as the demonstration."""
        reply: Message = prompt.metadata[PREFERENCE][side]
        if self._chat:
            return replace(prompt, messages=(*prompt.messages, reply))
        if not isinstance(reply.get("content"), str):
            raise DataError(f"The {side} reply to prompt {prompt.id} is not text; add --apply-chat-template.")
        return replace(prompt, label=reply["content"])
