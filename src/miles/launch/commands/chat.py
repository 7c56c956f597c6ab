"""``miles chat``: chat with a checkpoint on the native engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miles.backends.native.server.model_info import load_sampling_defaults
from miles.config.provenance import FLAG, Origins
from miles.core.errors import EngineError, MilesError
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import configure_cublas
from miles.launch.build.engines import load_engine
from miles.launch.build.models import PolicyCheckpoint, read_policy
from miles.launch.config import Config
from miles.observe.factory import build_view
from miles.rollout.sampling import build_training_sampling


def chat(config: Config, origins: Origins, *, in_run: bool = False) -> int:
    """Respond to each line of standard input; without a chat template, continue each.

    Sampling parameters that no flag sets are those of the checkpoint's ``generation_config.json``. ``in_run``: the
    checkpoint is of a run, which has a chat template only if it was trained with one.
    """
    configure_cublas(config.models.numerics)
    asyncio.run(_chat(config, {name for name, origin in origins.items() if origin == FLAG}, in_run))
    return 0


async def _chat(config: Config, given: Collection[str], in_run: bool) -> None:
    view = build_view(config.observe.view, stream=sys.stderr)  # standard output has only the conversation
    with view.stage("Loading the model"):
        policy = read_policy(config)
        engine = await load_engine(config, policy)
    view.close()
    has_template = policy.tokenizer.has_chat_template and (config.rollout.apply_chat_template or not in_run)
    conversation = Conversation(config, policy, given=given, has_template=has_template)
    if sys.stdin.isatty():
        hint = "an empty line starts over" if conversation.has_template else "no chat template: lines are independent"
        print(f"Chatting with {policy.folder} ({hint}; Ctrl-D ends).")
    turn = 0
    while (line := _read_line()) is not None:
        if not line:
            conversation.clear()
            continue
        try:
            tokens = conversation.add_user_message(line)
            sampling = replace(conversation.build_sampling(len(tokens)), seed=config.rollout.rollout_seed + turn)
            printer = ReplyPrinter(policy.tokenizer.text)
            completion = await engine.generate_stream(np.array(tokens, np.int32), sampling, printer.add)
        except MilesError as error:  # start the conversation over, but not the chat
            print(f"miles: {error}", file=sys.stderr)
            conversation.clear()
            continue
        printer.finish(conversation.add_reply([int(t) for span in completion.spans for t in span.tokens]))
        turn += 1
    await engine.close()


class Conversation:
    """The messages so far, rendered with the model's chat template if it has one."""

    def __init__(self, config: Config, policy: PolicyCheckpoint, *, given: Collection[str], has_template: bool) -> None:
        self.has_template = has_template
        self._policy = policy
        self._given = given
        self._rollout = config.rollout
        self._messages: list[dict[str, Any]] = []

    def add_user_message(self, line: str) -> list[int]:
        """Add a message; returns the tokens to continue."""
        tokenizer = self._policy.tokenizer
        if not self.has_template:
            return tokenizer.encode(line)
        self._messages.append({"role": "user", "content": line})
        system = (
            [] if self._rollout.system_prompt is None else [{"role": "system", "content": self._rollout.system_prompt}]
        )
        return tokenizer.apply_chat_template(
            [*system, *self._messages], add_generation_prompt=True, **self._rollout.apply_chat_template_kwargs
        )

    def add_reply(self, tokens: list[int]) -> str:
        """Add the reply; returns its text."""
        text = self._policy.tokenizer.text(tokens).strip()
        self._messages.append({"role": "assistant", "content": text})
        return text

    def clear(self) -> None:
        self._messages.clear()

    def build_sampling(self, prompt_length: int) -> SamplingParams:
        """The sampling parameters of the config, limited to the model's context."""
        sampling = build_training_sampling(self._rollout)
        defaults = load_sampling_defaults(self._policy.folder)
        own = {name: value for name, value in defaults.items() if f"rollout_{name}" not in self._given}
        sampling = replace(
            sampling,
            temperature=own.get("temperature", sampling.temperature),
            top_p=own.get("top_p", sampling.top_p),
            top_k=int(own.get("top_k", sampling.top_k)),
        )
        positions = self._policy.spec.max_positions
        if positions <= prompt_length:
            raise EngineError(f"the conversation fills the model's {positions} positions, so it starts over")
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, positions - prompt_length))


class ReplyPrinter:
    """Prints a reply as its tokens arrive; white space at the ends, and characters still incomplete, are held back."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._printed = ""

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        text = self._decode(self._tokens).strip()
        if text.startswith(self._printed) and not text.endswith("\ufffd"):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def finish(self, reply: str) -> None:
        """Print the rest of ``reply``; the whole of it where another text was printed."""
        rest = reply[len(self._printed) :] if reply.startswith(self._printed) else f"\n{reply}"
        print(rest, flush=True)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
