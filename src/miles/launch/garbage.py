"""How seldom a driver looks for garbage: with many trajectories under way it sees much and finds little.

An attempt under way is some dozens of objects that refer to each other. Python by default walks all of them again after
every few hundred new ones; what dies young is freed without that.
"""

from __future__ import annotations

import gc

from miles.launch.config import Config

MANY = 1024
"""Trajectories under way from which on it pays."""
_YOUNG = (20_000, 20, 20)


def inside_of(config: Config) -> int:
    """Most trajectories between the gate and the weights trained on them."""
    r = config.rollout
    entering = config.tempo.over_sampling_batch_size or r.rollout_batch_size
    return (config.schedule.max_weight_staleness + 1) * entering * r.n_samples_per_prompt


def collect_seldom(inside: int) -> None:
    """Before a run with so many trajectories between the gate and the weights trained on them."""
    if inside >= MANY:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_YOUNG)
