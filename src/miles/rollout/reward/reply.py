"""The text a grader is shown."""

from __future__ import annotations

from miles.core.errors import PlugError
from miles.core.types import Trajectory


def reply_of(name: str, trajectory: Trajectory) -> str:
    """The reply's text, which the generate function left in ``metadata["text"]``."""
    reply = trajectory.metadata.get("text")
    if reply is None:
        raise PlugError(
            f"The {name} reward grades text, and the generate function left none in metadata['text']; "
            "put the reply there or use --custom-rm-path."
        )
    return reply
