"""How the two meet: one sees a thing and signals, the other sees the signal and says which thing it was."""

from __future__ import annotations

from collections.abc import Mapping

from miles.core.types import Prompt, Reward
from miles.rollout.multi_agent.agents import Agents


async def signal(prompt: Prompt, cast: Agents) -> Mapping[str, float | Reward]:
    """A rollout.cast.cast.Play: both earn 1 when the thing arrives."""
    said = await cast["speaker"].chat(prompt.messages)
    heard = await cast["listener"].chat([{"role": "user", "content": said.text or "?"}])
    right = float(heard.text == prompt.label)
    return {"speaker": right, "listener": right}
