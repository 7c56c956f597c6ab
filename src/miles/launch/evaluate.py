"""``miles eval``: score a checkpoint on held-out prompts, without training."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from miles.kernels import arithmetic
from miles.launch.answering import answering_of
from miles.launch.casting import casting_of
from miles.launch.company import enrol, lone_stage
from miles.launch.config import Config
from miles.launch.plan import Plan
from miles.launch.plugged import logged
from miles.launch.wire import evaluator_of
from miles.observe.text import fixed
from miles.observe.view import make_view


def evaluate(config: Config, plan: Plan, origins: Mapping[str, str]) -> int:
    """Print every held-out metric of ``--hf-checkpoint``, one a line."""
    arithmetic.use(config.models.parity)
    metrics = asyncio.run(_evaluate(config))
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name.ljust(width)}  {fixed(value, 4)}")
    return 0


async def _evaluate(config: Config) -> Mapping[str, float]:
    view = make_view(config.observe.view, stream=sys.stderr)  # standard output is the scores alone
    try:
        with view.stage("Loading the model and the prompts"):
            company = enrol(config)
            main, engines = company.main, await lone_stage(company)
            answering, casting = answering_of(main.config, main.policy), casting_of(config, company)
            answers = answering if casting is None else casting.answering(answering, engines, evaluates=True)
            evaluator, notes = evaluator_of(main.config, answers, engines[main.member.name])
        assert evaluator is not None, "a rule asks for --eval-prompt-data"
        for note in notes:
            view.note(note)
        with view.stage("Answering"):
            try:
                return await logged(config, evaluator)()
            finally:
                if casting is not None:
                    await casting.close()
                await answering.close()
    finally:
        view.close()
