"""What the tests of rewards share: a prompt, a trajectory at it, and how to ask for its score."""

import asyncio
from typing import Any

import numpy as np

from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.mixture import build_builtin_reward


def prompt(label: str | None = None, **kw: Any) -> Prompt:
    content = kw.pop("content", "?")
    return Prompt(id=kw.pop("id", 3), messages=({"role": "user", "content": content},), label=label, **kw)


def trajectory(text: str | None = None, index: int = 0, **kw: Any) -> Trajectory:
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    metadata = {} if text is None else {"text": text}
    return Trajectory(branches=((asked,),), status=Status.COMPLETED, index=index, metadata=metadata, **kw)


def reward(
    name: str, reply: str, label: str | None, *, metadata: Any = None, means: GraderContext | None = None
) -> Reward:
    score = build_builtin_reward(name, means or GraderContext())
    return asyncio.run(score(prompt(label, metadata=metadata or {}), trajectory(reply)))  # type: ignore[arg-type]


def value(*given: Any, **kw: Any) -> float:
    return reward(*given, **kw).value
