"""What a function's parameters say of it: one of upstream's is put behind the door it was named for, any other is left.

A function is upstream's where its parameters, by their number and with ``args`` in its place, are those upstream calls
it with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from miles.plug.upstream import batches, groups, sources
from miles.plug.upstream.run import Run

Fitting = Callable[[Any, Run], Any]

SHAPES: Mapping[str, tuple[tuple[tuple[str, ...], Fitting], ...]] = MappingProxyType(
    {
        "Generate": ((("args", "sample", "sampling_params"), groups.generate),),
        "RewardFn": ((("args", "sample"), groups.reward),),
        "GroupRewardFn": ((("args", "samples"), groups.group_reward),),
        "Filter": ((("args", "samples"), groups.group_filter),),
        "Worth": ((("args", "samples"), groups.worth),),
        "Credit": ((("args", "samples"), groups.credit),),
        "SampleFilter": ((("args", "samples"), groups.sample_filter),),
        "BufferFilter": ((("args", "rollout_id", "buffer", "num_samples"), groups.buffer_filter),),
        "AllSamples": (
            (("args", "samples"), batches.all_samples),
            (("args", "samples", "source"), batches.all_samples),
        ),
        "PostProcess": ((("args", "rollout_data"), batches.post_process),),
        "RolloutLog": ((("rollout_id", "args", "samples", "metrics", "time"), batches.rollout_log),),
        "EvalLog": ((("rollout_id", "args", "data", "metrics"), batches.eval_log),),
        "Init": ((("args",), batches.init),),
        "DataSource": ((("args",), sources.data_source),),
    }
)
"""Door -> the parameters of upstream's functions there, of which only ``args`` goes by its name, and their fitting."""


def fit(plug: Any, door: str, run: Run, asker: str) -> Any:
    """``plug`` behind the door of that name where it is upstream's; ``plug`` itself where it is not."""
    for names, fitting in SHAPES.get(door, ()):
        if _is_like(plug, names):
            return fitting(plug, run)
    return plug


def _is_like(plug: Any, names: tuple[str, ...]) -> bool:
    try:
        parameters = list(inspect.signature(plug).parameters.values())
    except (TypeError, ValueError):
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    room = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    at = names.index("args")
    if len(room) < len(names) or room[at].name != "args":
        return False
    return len(required) <= len(names) or _asks_for_evaluation(names, required)


def _asks_for_evaluation(names: tuple[str, ...], required: list[inspect.Parameter]) -> bool:
    """A generate function may insist on being told whether it is evaluated."""
    return names[1:2] == ("sample",) and [p.name for p in required[len(names) :]] == ["evaluation"]
