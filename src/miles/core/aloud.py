"""Listen to an engine while it writes, where it lets one; of any other, the whole is there at the end."""

from __future__ import annotations

from miles.core.protocols import Aloud, Completion, Engine, Hear, Sampling
from miles.core.types import Tokens


async def generate_aloud(engine: Engine, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion:
    """``engine.generate``, with ``hear`` told tokens as they come; told nothing by an engine that is not ``Aloud``."""
    if isinstance(engine, Aloud):
        return await engine.generate_aloud(tokens, sampling, hear)
    return await engine.generate(tokens, sampling)
