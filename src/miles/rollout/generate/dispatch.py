"""Per-prompt dispatch of generate functions, and the circuit breaker they share."""

from __future__ import annotations

from collections.abc import Mapping

from miles.core.errors import DataError, HookError
from miles.core.protocols import Engine, Generate, ResumableGenerate, SamplingParams
from miles.core.types import Prompt, Trajectory

GENERATE_KEY = "generate"
"""Metadata key that names a prompt's generate function."""


class GenerateDispatch:
    """A core.protocols.Generate that passes each prompt to the function it names, or to ``default``."""

    def __init__(self, functions: Mapping[str, Generate], default: str) -> None:
        assert default in functions, "the default is one of the functions"
        self._functions = functions
        self._default = default

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        return await self._select(prompt)(prompt, engine, sampling)

    async def resume(self, prompt: Prompt, partial: Trajectory, engine: Engine, sampling: SamplingParams) -> Trajectory:
        """Resume an interrupted trajectory, where its function can; else restart it."""
        function = self._select(prompt)
        if isinstance(function, ResumableGenerate):
            return await function.resume(prompt, partial, engine, sampling)
        return await function(prompt, engine, sampling)

    def _select(self, prompt: Prompt) -> Generate:
        name = prompt.metadata.get(GENERATE_KEY, self._default)
        if name not in self._functions:
            raise DataError(
                f"Prompt {prompt.id} asks for the generate function {name!r}, and there is only "
                f"{', '.join(self._functions)}; fix metadata['{GENERATE_KEY}']."
            )
        return self._functions[name]


class CircuitBreaker:
    """Raises HookError, naming ``component``, at the last of ``max_failures`` consecutive failed trajectories."""

    def __init__(self, component: str, max_failures: int) -> None:
        self._component = component
        self._max_failures = max_failures
        self._consecutive = 0

    def record(self, prompt: Prompt, failure: str | None) -> None:
        """Record the result of a trajectory; ``failure`` is None where there was none."""
        self._consecutive = 0 if failure is None else self._consecutive + 1
        if failure is not None and self._consecutive >= self._max_failures:
            raise HookError(
                f"{self._component} failed in {self._consecutive} trajectories in a row, the last at prompt "
                f"{prompt.id} "
                f"({failure}); fix it, or allow more with --max-reward-failures."
            )
