"""Rewards that a server gives: any server of yours (``remote_rm``), or one with a scalar model (``reward_model``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.errors import PlugError, UsageError
from miles.core.protocols import RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.batches import Batches
from miles.rollout.reward.http import Client
from miles.rollout.reward.means import Means, ModelServer, Server
from miles.rollout.reward.reply import reply_of
from miles.rollout.reward.score import GradingError


def remote_reward(means: Means) -> RewardFn:
    """What the server at ``--rm-url`` says."""
    if means.remote is None:
        raise UsageError("--rm-type remote_rm asks a server: give its address with --rm-url.")
    return RemoteReward(means.remote, reward_key=means.reward_key)


def model_reward(means: Means) -> RewardFn:
    """What the scalar model served at ``--reward-model-url`` says."""
    if means.model is None:
        raise UsageError("--rm-type reward_model asks a served model: give its address with --reward-model-url.")
    return ModelReward(means.model)


class RemoteReward:
    """Posts ``{"prompt", "response", "label", "metadata", ...}``; the answer is a number, or an object of numbers.

    With batches of more than one, a list of those is posted, and a list of answers is expected.
    """

    def __init__(self, server: Server, *, reward_key: str | None = None) -> None:
        self._client = Client(server)
        self._single = server.batch == 1
        self._reward_key = reward_key
        self._batches = Batches(self._ask, size=server.batch, concurrency=server.concurrency)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        answer = await self._batches.put(
            {
                "prompt": prompt_of(prompt),
                "response": reply_of("remote_rm", trajectory),
                "label": prompt.label,
                "metadata": dict(prompt.metadata),
                "id": prompt.id,
                "index": trajectory.index,
            }
        )
        return self._reward(answer)

    async def _ask(self, questions: Sequence[Any]) -> Sequence[Any]:
        if self._single:
            return [await self._client.post("", questions[0])]
        answers = await self._client.post("", list(questions))
        if not isinstance(answers, list):
            raise GradingError("the server answered a list of attempts with something that is not a list")
        return answers

    def _reward(self, answer: Any) -> Reward:
        if not isinstance(answer, dict):
            return Reward(value=_number(answer))
        parts = {str(name): _number(part) for name, part in answer.items() if isinstance(part, int | float)}
        value = next((parts[name] for name in ("score", "reward") if name in parts), None)
        if value is not None:
            return Reward(value=value, parts=parts)
        if self._reward_key is None or self._reward_key not in parts:
            raise PlugError(
                f"The server at --rm-url answered with {', '.join(parts) or 'no number'}, and none is called score or "
                "reward; name the one to train on with --reward-key."
            )
        return Reward(value=parts[self._reward_key], parts=parts)


class ModelReward:
    """Asks a served classifier for one number an attempt, in SGLang's or in OpenAI's manner (vLLM's, too)."""

    def __init__(self, settings: ModelServer) -> None:
        self._settings = settings
        self._client = Client(settings.server)
        self._batches = Batches(self._ask, size=settings.server.batch, concurrency=settings.server.concurrency)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = reply_of("reward_model", trajectory)
        if self._settings.tokens_of is None:
            asked = prompt_of(prompt)
            text = asked if isinstance(asked, str) else "\n".join(str(m.get("content", "")) for m in asked)
            return Reward(value=_scalar(await self._batches.put(text + reply)))
        whole = [*prompt.messages, {"role": "assistant", "content": reply}]
        return Reward(value=_scalar(await self._batches.put(self._settings.tokens_of(whole))))

    async def _ask(self, questions: Sequence[Any]) -> Sequence[Any]:
        name = {} if self._settings.model is None else {"model": self._settings.model}
        if self._settings.api == "openai":
            answer = await self._client.post("/classify", {**name, "input": list(questions)})
            rows = answer.get("data") if isinstance(answer, dict) else None
        else:
            key = "text" if self._settings.tokens_of is None else "input_ids"
            rows = await self._client.post("/classify", {**name, key: list(questions)})
        if not isinstance(rows, list):
            raise GradingError("the reward model's answer holds no list of scores")
        return rows


def prompt_of(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    """A prompt of plain text as text, a conversation as its messages."""
    first = prompt.messages[0]
    alone = len(prompt.messages) == 1 and first.get("role") == "user" and isinstance(first.get("content"), str)
    return first["content"] if alone else [dict(message) for message in prompt.messages]


def _scalar(row: Any) -> float:
    """The one number of a classifier's row: SGLang's ``embedding``, or ``logits``, ``probs`` or ``score`` elsewhere."""
    if isinstance(row, dict):
        row = next((row[key] for key in ("embedding", "logits", "probs", "score") if key in row), None)
    if isinstance(row, list) and len(row) != 1:
        raise GradingError(f"the reward model gives {len(row)} numbers an attempt, and a scalar one gives 1")
    return _number(row[0] if isinstance(row, list) else row)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GradingError(f"the server gave {str(value)[:50]!r} for a reward, and a reward is a finite number")
    return float(value)
