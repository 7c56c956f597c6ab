"""Upstream's loss masks of conversations: the tokens of assistant messages are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.errors import HookError

Messages = Sequence[Mapping[str, Any]]


class MultiTurnLossMaskGenerator:
    """Tokens and loss masks of conversations, by the tokenizer's chat template; ``tokenizer_type`` is not needed."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(self, messages: Messages, tools: Any = None) -> tuple[list[int], list[int]]:
        """All tokens, and 1 for those of assistant messages; ``step_loss_mask`` 0 of a message excludes it."""
        tokens = self._render(messages, tools, add_generation_prompt=False)
        mask = [0] * len(tokens)
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("step_loss_mask", 1) != 1:
                continue
            before = self._render(messages[:at], tools, add_generation_prompt=True)
            after = self._render(messages[: at + 1], tools, add_generation_prompt=False)
            if after[: len(before)] != before or tokens[: len(after)] != after:
                raise HookError(
                    f"The chat template renders message {at} differently when other messages follow, so its tokens "
                    "cannot be told apart; use --loss-type sft_loss, which reads the template's own mask."
                )
            mask[len(before) : len(after)] = [1] * (len(after) - len(before))
        return tokens, mask

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The texts of runs of trained tokens."""
        runs: list[list[int]] = [[]]
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [self.tokenizer.decode(run) for run in runs if run]

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """The number of tokens from the first trained one on."""
        return get_response_lengths(loss_masks)

    def _render(self, messages: Messages, tools: Any, *, add_generation_prompt: bool) -> list[int]:
        if not messages and not add_generation_prompt:
            return []
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return self.tokenizer.encode(text, add_special_tokens=False)


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """The number of tokens from the first trained one on, of each mask."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]
