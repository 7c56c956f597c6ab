"""A reward of one's own: partial credit for writing a word backwards.

A reward is any ``async def (prompt, trajectory) -> Reward``. Its value is what is trained on; its
parts are for the logs, and ``--reward-key letters`` would train on one of them instead.
"""

from miles.core.types import Prompt, Reward, Trajectory


async def score(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """1 for the right word; up to half a point for letters in the right place; less for talking on."""
    assert prompt.label is not None, "run with --label-key answer"
    reply, wanted = trajectory.metadata["text"].strip(), prompt.label
    exact = float(reply == wanted)
    letters = sum(a == b for a, b in zip(reply, wanted, strict=False)) / len(wanted)
    brief = min(1.0, len(wanted) / max(len(reply), 1))
    return Reward(value=max(exact, 0.5 * letters * brief), parts={"exact": exact, "letters": letters, "brief": brief})
