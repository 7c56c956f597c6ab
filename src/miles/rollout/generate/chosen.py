"""Different prompts answered in different ways: which one, a column of the data says."""

from __future__ import annotations

from collections.abc import Mapping

from miles.core.errors import DataError
from miles.core.protocols import Engine, Generate, Resumes, Sampling
from miles.core.types import Prompt, Trajectory

GENERATE_KEY = "generate"
"""Where a prompt's metadata names the way it is answered."""


class Chosen:
    """A core.protocols.Generate that hands each prompt to the one it names, or to ``default``."""

    def __init__(self, ways: Mapping[str, Generate], default: str) -> None:
        assert default in ways, "the default is one of the ways"
        self._ways = ways
        self._default = default

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        return await self._way(prompt)(prompt, engine, sampling)

    async def resume(self, prompt: Prompt, past: Trajectory, engine: Engine, sampling: Sampling) -> Trajectory:
        """Go on with an attempt that was cut, where its way can; else it starts anew."""
        way = self._way(prompt)
        if isinstance(way, Resumes):
            return await way.resume(prompt, past, engine, sampling)
        return await way(prompt, engine, sampling)

    def _way(self, prompt: Prompt) -> Generate:
        name = prompt.metadata.get(GENERATE_KEY, self._default)
        if name not in self._ways:
            raise DataError(
                f"Prompt {prompt.id} wants to be answered by {name!r}, and there is only "
                f"{', '.join(self._ways)}; mend metadata['{GENERATE_KEY}']."
            )
        return self._ways[name]
