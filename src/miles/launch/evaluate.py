"""``miles eval``: score a checkpoint on held-out prompts, without training."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from miles.launch.answering import answering_of
from miles.launch.config import Config
from miles.launch.engines import lone_engine
from miles.launch.plan import Plan
from miles.launch.policy import read_policy
from miles.launch.wire import evaluator_of
from miles.observe.text import fixed
from miles.observe.view import make_view


def evaluate(config: Config, plan: Plan, origins: Mapping[str, str]) -> int:
    """Print every held-out metric of ``--hf-checkpoint``, one a line."""
    metrics = asyncio.run(_evaluate(config))
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name.ljust(width)}  {fixed(value, 4)}")
    return 0


async def _evaluate(config: Config) -> Mapping[str, float]:
    view = make_view(config.observe.view, stream=sys.stderr)  # standard output is the scores alone
    try:
        with view.stage("Loading the model and the prompts"):
            policy = read_policy(config)
            engine = await lone_engine(config, policy)
            answering = answering_of(config, policy)
            evaluator, notes = evaluator_of(config, answering, engine)
        assert evaluator is not None, "a rule asks for --eval-prompt-data"
        for note in notes:
            view.note(note)
        with view.stage("Answering"):
            try:
                return await evaluator()
            finally:
                await answering.close()
    finally:
        view.close()
