"""How seldom a process looks for garbage: what is loaded stays, and of what is under way little is garbage.

Python now and then walks over all objects there are, those of modules, models and compiled code among them: that takes
a tenth of a second, in which an accelerator may have to wait. An attempt under way is some dozens of objects that refer
to each other; what dies young is freed without any of that.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from miles.launch.config import Config

MANY = 1024
"""Trajectories under way from which on it pays to look at young objects less often."""
_YOUNG = (20_000, 20, 20)


def inside_of(config: Config) -> int:
    """Most trajectories between the gate and the weights trained on them."""
    r = config.rollout
    entering = config.tempo.over_sampling_batch_size or r.rollout_batch_size
    return (config.schedule.max_weight_staleness + 1) * entering * r.n_samples_per_prompt


@contextmanager
def collecting_seldom(inside: int = 0) -> Iterator[None]:
    """While this lasts what is there now is not looked at; ``inside`` trajectories are under way."""
    usual = gc.get_threshold()
    gc.collect(1)  # of the old what is garbage is found when this is over
    gc.freeze()
    if inside >= MANY:
        gc.set_threshold(*_YOUNG)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
