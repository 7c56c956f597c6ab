"""How the small model answers: in turns, with a calculator (see the class ``Calculating``)."""

from __future__ import annotations

import sys
from pathlib import Path

from miles.core.protocols import Engine, SamplingParams
from miles.core.types import Prompt, Trajectory
from miles.rollout.generate.multi_turn import MultiTurn, TurnLimits
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.tool import ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

sys.path.insert(0, str(Path(__file__).parent))
from products import tokenizer  # the file beside this one


class Calculating:
    """A core.protocols.Generate: at most three replies, and whatever they call is answered."""

    def __init__(self) -> None:
        environments = EnvironmentFactory(
            ToolRegistry(ToolResources(), default=["calculator"]), ToolLimits(result_chars=16)
        )
        self._generate = MultiTurn(
            build_renderer(tokenizer()), environments, limits=TurnLimits(turns=3), max_context_len=96
        )

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        return await self._generate(prompt, engine, sampling)
