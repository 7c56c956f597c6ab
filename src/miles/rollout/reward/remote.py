"""Remote rewards: a custom HTTP server (``remote_rm``), or a served scalar reward model (``reward_model``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.errors import HookError, UsageError
from miles.core.protocols import RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.batching import RequestBatcher
from miles.rollout.reward.context import GraderContext, HTTPEndpoint, RewardModelEndpoint
from miles.rollout.reward.http import JSONClient
from miles.rollout.reward.types import GradingError, get_response_text


def build_remote_reward(context: GraderContext) -> RewardFn:
    """Build the reward that queries ``--rm-url``."""
    if context.remote is None:
        raise UsageError("--rm-type remote_rm asks a server: give its address with --rm-url.")
    return RemoteReward(context.remote, reward_key=context.reward_key)


def build_model_reward(context: GraderContext) -> RewardFn:
    """Build the reward that queries the model at ``--reward-model-url``."""
    if context.model is None:
        raise UsageError("--rm-type reward_model asks a served model: give its address with --reward-model-url.")
    return ModelReward(context.model)


class RemoteReward:
    """Posts ``{"prompt", "response", "label", "metadata", ...}``; the answer is a number, or an object of numbers.

    With batches of more than one, a list of those is posted, and a list of answers is expected.
    """

    def __init__(self, server: HTTPEndpoint, *, reward_key: str | None = None) -> None:
        self._client = JSONClient(server)
        self._single = server.batch == 1
        self._reward_key = reward_key
        self._batcher = RequestBatcher(self._send, size=server.batch, concurrency=server.concurrency)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        answer = await self._batcher.submit(
            {
                "prompt": get_prompt_content(prompt),
                "response": get_response_text("remote_rm", trajectory),
                "label": prompt.label,
                "metadata": dict(prompt.metadata),
                "id": prompt.id,
                "index": trajectory.index,
            }
        )
        return self._reward(answer)

    async def _send(self, requests: Sequence[Any]) -> Sequence[Any]:
        if self._single:
            return [await self._client.post("", requests[0])]
        answers = await self._client.post("", list(requests))
        if not isinstance(answers, list):
            raise GradingError("the server answered a list of requests with something that is not a list")
        return answers

    def _reward(self, answer: Any) -> Reward:
        if not isinstance(answer, dict):
            return Reward(value=_number(answer))
        parts = {str(name): _number(part) for name, part in answer.items() if isinstance(part, int | float)}
        value = next((parts[name] for name in ("score", "reward") if name in parts), None)
        if value is not None:
            return Reward(value=value, parts=parts)
        if self._reward_key is None or self._reward_key not in parts:
            raise HookError(
                f"The server at --rm-url answered with {', '.join(parts) or 'no number'}, and none is called score or "
                "reward; name the one to train on with --reward-key."
            )
        return Reward(value=parts[self._reward_key], parts=parts)


class ModelReward:
    """Queries a served classifier for one number per trajectory, in SGLang's or OpenAI's format (also vLLM's)."""

    def __init__(self, settings: RewardModelEndpoint) -> None:
        self._settings = settings
        self._client = JSONClient(settings.server)
        self._batcher = RequestBatcher(self._send, size=settings.server.batch, concurrency=settings.server.concurrency)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = get_response_text("reward_model", trajectory)
        if self._settings.render_tokens is None:
            content = get_prompt_content(prompt)
            text = content if isinstance(content, str) else "\n".join(str(m.get("content", "")) for m in content)
            return Reward(value=_scalar(await self._batcher.submit(text + reply)))
        conversation = [*prompt.messages, {"role": "assistant", "content": reply}]
        return Reward(value=_scalar(await self._batcher.submit(self._settings.render_tokens(conversation))))

    async def _send(self, requests: Sequence[Any]) -> Sequence[Any]:
        name = {} if self._settings.model is None else {"model": self._settings.model}
        if self._settings.api == "openai":
            answer = await self._client.post("/classify", {**name, "input": list(requests)})
            rows = answer.get("data") if isinstance(answer, dict) else None
        else:
            key = "text" if self._settings.render_tokens is None else "input_ids"
            rows = await self._client.post("/classify", {**name, key: list(requests)})
        if not isinstance(rows, list):
            raise GradingError("the reward model's answer holds no list of scores")
        return rows


def get_prompt_content(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    """The text of a plain-text prompt, or the messages of a conversation."""
    first = prompt.messages[0]
    is_plain = len(prompt.messages) == 1 and first.get("role") == "user" and isinstance(first.get("content"), str)
    return first["content"] if is_plain else [dict(message) for message in prompt.messages]


def _scalar(row: Any) -> float:
    """The one number of a classifier's output: SGLang's ``embedding``, or ``logits``, ``probs`` or ``score``."""
    if isinstance(row, dict):
        row = next((row[key] for key in ("embedding", "logits", "probs", "score") if key in row), None)
    if isinstance(row, list) and len(row) != 1:
        raise GradingError(f"the reward model gives {len(row)} numbers per trajectory, and a scalar model gives 1")
    return _number(row[0] if isinstance(row, list) else row)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GradingError(f"the server gave {str(value)[:50]!r} for a reward, and a reward is a finite number")
    return float(value)
