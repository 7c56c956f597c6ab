"""Environment registry: creates the environment a prompt or the run names, or a plain tool environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial, wraps
from importlib import import_module
from types import MappingProxyType
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt
from miles.hooks.worker import HookWorker
from miles.rollout.tools.environment import (
    Environment,
    OpenResult,
    SandboxContext,
    StepResult,
    ToolAugmentedEnvironment,
    ToolEnvironment,
)
from miles.rollout.tools.tool import Message, ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry

_PACKAGE = "miles.rollout.tools.environments"
ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": f"{_PACKAGE}.text_games:GymnasiumGame",
        "textarena": f"{_PACKAGE}.text_games:TextArenaGame",
        "reasoning_gym": f"{_PACKAGE}.reasoning_gym:ReasoningGym",
        "verifiers": f"{_PACKAGE}.verifiers:VerifiersEnvironment",
        "openenv": f"{_PACKAGE}.openenv:OpenEnvEnvironment",
        "swebench": f"{_PACKAGE}.swebench:SweBenchEnvironment",
    }
)
_RUN_PROGRAMS = ("swebench",)
"""Environments that are given the run's sandbox."""
ENVIRONMENT_KEY = "environment"
"""Metadata key with a prompt's environment: a name, or an object with ``name`` and settings."""


EnvironmentMaker = Callable[..., Environment]
"""Creates the environment of one trajectory from settings by name."""


class OffloadedEnvironment:
    """A user's environment in the ``worker``'s thread, from its constructor on."""

    def __init__(self, worker: HookWorker, make: Callable[[], Environment]) -> None:
        self._worker = worker
        self._make = make
        self._inner: Environment | None = None

    async def open(self, prompt: Prompt) -> OpenResult:
        async def call() -> OpenResult:
            self._inner = self._make()
            return await self._inner.open(prompt)

        return await self._worker.run(call, "The environment")

    async def step(self, reply: Message) -> StepResult:
        assert self._inner is not None, "it was opened"
        return await self._worker.run(partial(self._inner.step, reply), "The environment")

    async def close(self) -> None:
        if self._inner is not None:
            await self._worker.run(self._inner.close, "The environment")


def offload_environment(worker: HookWorker, make: EnvironmentMaker) -> EnvironmentMaker:
    """``make`` for environments in the ``worker``'s thread; those built on the run's tools stay on its loop."""
    if isinstance(make, type) and issubclass(make, ToolEnvironment | ToolAugmentedEnvironment):
        return make

    @wraps(make, updated=())
    def make_offloaded(**settings: Any) -> Environment:
        return OffloadedEnvironment(worker, partial(make, **settings))

    return make_offloaded


class EnvironmentFactory:
    """Creates one environment per trajectory. ``custom`` are user-defined ones by name, beside the built-in ones.

    ``default`` is the environment of prompts that name none, in the same format; without it they only have tools.
    """

    def __init__(
        self,
        tools: ToolRegistry,
        limits: ToolLimits,
        *,
        default: str | Mapping[str, Any] | None = None,
        custom: Mapping[str, EnvironmentMaker] = MappingProxyType({}),
    ) -> None:
        self._tools = tools
        self._limits = limits
        self._default = default
        self._custom = custom

    def __call__(self, prompt: Prompt) -> Environment:
        spec = prompt.metadata.get(ENVIRONMENT_KEY, self._default)
        if spec is None:
            return ToolEnvironment(self._tools.open, self._limits)
        environment = self._create(prompt, spec)
        return (
            ToolAugmentedEnvironment(environment, self._tools.open, self._limits)
            if self._tools.names(prompt)
            else environment
        )

    async def close(self) -> None:
        """Stop what all trajectories share; none may be running."""
        await self._tools.close()

    def _create(self, prompt: Prompt, spec: Any) -> Environment:
        settings = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            raise DataError(
                f"Prompt {prompt.id}: metadata['{ENVIRONMENT_KEY}'] must be a name, or an object with a name, and is "
                f"{spec!r}."
            )
        rest = {key: value for key, value in settings.items() if key != "name"}
        make = self._find_maker(prompt, settings["name"])
        if settings["name"] in _RUN_PROGRAMS and settings["name"] not in self._custom:
            rest["context"] = SandboxContext(
                sandbox=self._tools.get_sandbox, code_limits=self._tools.code_limits, tool_limits=self._limits
            )
        try:
            inspect.signature(make).bind(**rest)
        except TypeError as error:
            raise DataError(
                f"Prompt {prompt.id}: the environment {settings['name']} {error}; fix its settings."
            ) from error
        return make(**rest)

    def _find_maker(self, prompt: Prompt, name: str) -> EnvironmentMaker:
        if name in self._custom:
            return self._custom[name]
        if name not in ENVIRONMENTS:
            available = (*ENVIRONMENTS, *self._custom)
            close = get_close_matches(name, available, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(available)}."
            raise DataError(f"Prompt {prompt.id}: there is no environment {name}; {hint}")
        module, _, class_name = ENVIRONMENTS[name].partition(":")
        return getattr(import_module(module), class_name)
