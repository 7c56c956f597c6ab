"""``miles chat``: talk to a checkpoint, on the same engine that training samples with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from miles.core.errors import EngineError, MilesError
from miles.core.protocols import Sampling
from miles.kernels import arithmetic
from miles.launch.config import Config
from miles.launch.engines import lone_engine
from miles.launch.plan import Plan
from miles.launch.policy import Policy, read_policy
from miles.observe.view import make_view
from miles.rollout.sampling import training_sampling


def chat(config: Config, plan: Plan, origins: Mapping[str, str]) -> int:
    """Read lines from standard input until its end, and answer each; without a chat template, continue each."""
    arithmetic.use(config.models.parity)
    asyncio.run(_chat(config))
    return 0


async def _chat(config: Config) -> None:
    view = make_view(config.observe.view, stream=sys.stderr)  # standard output is the conversation alone
    with view.stage("Loading the model"):
        policy = read_policy(config)
        engine = await lone_engine(config, policy)
    view.close()
    conversation = Conversation(config, policy)
    if sys.stdin.isatty():
        how = "an empty line starts over" if conversation.remembers else "every line stands alone: no chat template"
        print(f"Talking to {policy.folder} ({how}; Ctrl-D ends).")
    turn = 0
    while (line := _ask()) is not None:
        if not line:
            conversation.forget()
            continue
        try:
            asked = conversation.ask(line)
            sampling = replace(conversation.sampling(len(asked)), seed=config.rollout.rollout_seed + turn)
            completion = await engine.generate(np.array(asked, np.int32), sampling)
        except MilesError as error:  # what cannot be answered ends the conversation so far, not the chat
            print(f"miles: {error}", file=sys.stderr)
            conversation.forget()
            continue
        print(conversation.hear([int(t) for span in completion.spans for t in span.tokens]), flush=True)
        turn += 1
    await engine.close()


class Conversation:
    """What has been said so far, rendered by the model's own chat template where it has one."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.remembers = policy.tokenizer.has_chat_template
        self._policy = policy
        self._rollout = config.rollout
        self._messages: list[dict[str, Any]] = []

    def ask(self, line: str) -> list[int]:
        """The tokens to continue."""
        tokenizer = self._policy.tokenizer
        if not self.remembers:
            return tokenizer.encode(line)
        self._messages.append({"role": "user", "content": line})
        return tokenizer.render(self._messages, add_generation_prompt=True, **self._rollout.apply_chat_template_kwargs)

    def hear(self, tokens: list[int]) -> str:
        """The reply as text, remembered."""
        text = self._policy.tokenizer.text(tokens).strip()
        self._messages.append({"role": "assistant", "content": text})
        return text

    def forget(self) -> None:
        self._messages.clear()

    def sampling(self, asked: int) -> Sampling:
        """The run's sampling, no longer than the model's context leaves room for."""
        sampling = training_sampling(self._rollout)
        room = self._policy.spec.max_positions - asked
        if room < 1:
            positions = self._policy.spec.max_positions
            raise EngineError(f"the conversation fills the model's {positions} positions, so it starts over")
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
