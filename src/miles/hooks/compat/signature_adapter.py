"""Upstream compatibility at load time: detects upstream signatures, and provides the modules upstream code imports.

A function has an upstream signature where the number of its parameters and the position of ``args`` are those with
which upstream calls it; any other function is left as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from miles.hooks.compat import adapters, engine, types
from miles.hooks.compat.types import UpstreamContext

Adapter = Callable[[Any, UpstreamContext], Any]

UPSTREAM_SIGNATURES: Mapping[str, tuple[tuple[tuple[str, ...], Adapter], ...]] = MappingProxyType(
    {
        "Generate": ((("args", "sample", "sampling_params"), adapters.adapt_generate),),
        "RewardFn": ((("args", "sample"), adapters.adapt_reward),),
        "GroupRewardFn": ((("args", "samples"), adapters.adapt_group_reward),),
        "Filter": ((("args", "samples"), adapters.adapt_filter),),
        "AdvantageFn": ((("args", "samples"), adapters.adapt_advantage_fn),),
        "AdvantageEstimator": ((("args", "samples"), adapters.adapt_advantage_estimator),),
        "SampleFilter": ((("args", "groups"), adapters.adapt_sample_filter),),
        "BufferFilter": ((("args", "rollout_id", "buffer", "num_samples"), adapters.adapt_buffer_filter),),
        "AllSamples": (
            (("args", "samples"), adapters.adapt_all_samples),
            (("args", "samples", "source"), adapters.adapt_all_samples),
        ),
        "PostProcess": ((("args", "rollout_data"), adapters.adapt_post_process),),
        "RolloutLog": ((("rollout_id", "args", "samples", "metrics", "time"), adapters.adapt_rollout_log),),
        "EvalLog": ((("rollout_id", "args", "data", "metrics"), adapters.adapt_eval_log),),
        "InitHook": ((("args",), adapters.adapt_init),),
        "DataSource": ((("args",), adapters.adapt_data_source),),
    }
)
"""Protocol name -> upstream's parameters, of which only ``args`` is matched by name, and the adapter."""


def adapt_signature(hook: Any, protocol_name: str, run: UpstreamContext, asker: str) -> Any:
    """Adapt ``hook`` to the protocol where it has an upstream signature; else return it as it is."""
    for names, adapter in UPSTREAM_SIGNATURES.get(protocol_name, ()):
        if _has_signature(hook, names):
            return adapter(hook, run)
    return hook


def _has_signature(hook: Any, names: tuple[str, ...]) -> bool:
    try:
        parameters = list(inspect.signature(hook).parameters.values())
    except (TypeError, ValueError):
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    at = names.index("args")
    if len(positional) < len(names) or positional[at].name != "args":
        return False
    return len(required) <= len(names) or _asks_for_evaluation(names, required)


def _asks_for_evaluation(names: tuple[str, ...], required: list[inspect.Parameter]) -> bool:
    """A generate function may require the argument ``evaluation``."""
    return names[1:2] == ("sample",) and [p.name for p in required[len(names) :]] == ["evaluation"]


MODULES: Mapping[str, Mapping[str, Any]] = {
    "miles.utils": {},
    "miles.utils.types": {"Sample": types.UpstreamSample},
    "miles.utils.http_utils": {"post": engine.post},
    "miles.rollout.sglang_rollout": {"GenerateState": engine.GenerateState},
    "miles.rollout.filter_hub": {},
    "miles.rollout.filter_hub.base_types": {"DynamicFilterOutput": types.DynamicFilterOutput},
}
"""Only these names can be imported; there are no such files."""


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of the table, after all real modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, self, is_package=any(name.startswith(f"{fullname}.") for name in MODULES))

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES[module.__name__])


_FINDER = _Finder()


def install_upstream_modules() -> None:
    """Make the modules of the table importable."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
