"""A user's own rewards, as worker processes import them."""

import os
import signal
from pathlib import Path

from miles.core.errors import HookError
from miles.core.types import Prompt, Reward, Trajectory


async def score(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """What the label asks for."""
    match prompt.label:
        case "raise":
            raise RuntimeError("this reply has no end")
        case "stop":
            raise HookError("the table of answers is missing; write it.")
        case "number":
            return 0.5  # pyright: ignore[reportReturnType]
        case "pid":
            return Reward(value=float(os.getpid()))
        case "die once":
            mark = Path(prompt.metadata["mark"])
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    text, lengths = trajectory.metadata["text"], [len(span) for span in trajectory.spans]
    return Reward(value=len(text) + prompt.id, parts={"tokens": sum(lengths), "turn": prompt.metadata.get("turn", 0)})


async def compare(prompt: Prompt, trajectories: list[Trajectory]) -> list[Reward]:
    """The longest earns the most."""
    order = sorted(len(t.metadata["text"]) for t in trajectories)
    return [Reward(value=float(order.index(len(t.metadata["text"])))) for t in trajectories]
