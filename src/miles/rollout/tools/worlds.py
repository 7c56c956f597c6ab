"""Which world an attempt is made in: what the prompt names, or the run, or only a prompt and its tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt
from miles.rollout.tools.box import Box
from miles.rollout.tools.environment import Environment, Equipped, ToolUse
from miles.rollout.tools.tool import ToolLimits

_ROOM = "miles.rollout.tools.environments"
ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": f"{_ROOM}.textgame:GymnasiumGame",
        "textarena": f"{_ROOM}.textgame:TextArenaGame",
        "reasoning_gym": f"{_ROOM}.reasoning:ReasoningGym",
        "verifiers": f"{_ROOM}.verifiers:VerifiersEnvironment",
        "openenv": f"{_ROOM}.openenv:OpenEnvEnvironment",
    }
)
ENVIRONMENT_KEY = "environment"
"""Where a prompt's metadata names its world: a name, or an object with ``name`` and the settings of that world."""


Make = Callable[..., Environment]
"""Makes a fresh environment for one attempt, from settings by name."""


class Worlds:
    """Gives every attempt its world. ``own`` are the user's, by name; a prompt may name those and the built-in ones.

    ``default`` is the world of prompts that name none, in the same words; without it they have their tools alone.
    """

    def __init__(
        self,
        box: Box,
        limits: ToolLimits,
        *,
        default: str | Mapping[str, Any] | None = None,
        own: Mapping[str, Make] = MappingProxyType({}),
    ) -> None:
        self._box = box
        self._limits = limits
        self._default = default
        self._own = own

    def __call__(self, prompt: Prompt) -> Environment:
        asked = prompt.metadata.get(ENVIRONMENT_KEY, self._default)
        if asked is None:
            return ToolUse(self._box.open, self._limits)
        world = self._made(prompt, asked)
        return Equipped(world, self._box.open, self._limits) if self._box.names(prompt) else world

    async def close(self) -> None:
        """End what all attempts shared; nothing may be under way."""
        await self._box.close()

    def _made(self, prompt: Prompt, asked: Any) -> Environment:
        settings = {"name": asked} if isinstance(asked, str) else asked
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            raise DataError(
                f"Prompt {prompt.id}: metadata['{ENVIRONMENT_KEY}'] must be a name, or an object with a name, and is "
                f"{asked!r}."
            )
        rest = {key: value for key, value in settings.items() if key != "name"}
        make = self._make(prompt, settings["name"])
        try:
            inspect.signature(make).bind(**rest)
        except TypeError as error:
            raise DataError(f"Prompt {prompt.id}: the environment {settings['name']} {error}; mend it.") from error
        return make(**rest)

    def _make(self, prompt: Prompt, name: str) -> Make:
        if name in self._own:
            return self._own[name]
        if name not in ENVIRONMENTS:
            every = (*ENVIRONMENTS, *self._own)
            close = get_close_matches(name, every, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(every)}."
            raise DataError(f"Prompt {prompt.id}: there is no environment {name}; {hint}")
        module, _, found = ENVIRONMENTS[name].partition(":")
        return getattr(import_module(module), found)
