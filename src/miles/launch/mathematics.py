"""The mathematics of a run: the algorithm its knobs name, with the user's own parts in it."""

from __future__ import annotations

from typing import Any

from miles.algo.config import distils
from miles.algo.distill import Routed
from miles.algo.table import Plugs, credit_of
from miles.core.protocols import Credit
from miles.launch.config import Config
from miles.launch.plan import teacher_folders
from miles.launch.upstream import upstream_of
from miles.plug.point import Point
from miles.plug.points import CORRECTION, CREDIT, OBJECTIVE, REDUCER, WORTH
from miles.plug.upstream.run import Run


def plugs_of(config: Config) -> Plugs:
    """What the user brought for the trainer, loaded and held against its doors."""
    a = config.algo
    return Plugs(
        objective=_own(OBJECTIVE, a.custom_loss_function_path),
        reducer=_own(REDUCER, a.custom_pg_loss_reducer_function_path),
        correction=_own(CORRECTION, a.custom_tis_function_path),
    )


def credit_for(config: Config) -> Credit:
    """How this run's scored groups become training rows."""
    a = config.algo
    credit = credit_of(
        a,
        response_limit=config.rollout.rollout_max_response_len,
        worth=_own(WORTH, a.custom_reward_post_process_path, upstream_of(config)),
        credit=_own(CREDIT, a.custom_convert_samples_to_train_data_path, upstream_of(config)),
    )
    if distils(a) and config.train.opd_teachers:
        return Routed(credit=credit, names=tuple(teacher_folders(config)), key=a.opd_teacher_key)
    return credit


def _own(point: Point, path: str | None, run: Run | None = None) -> Any:
    return None if path is None else point.load(path, run)
