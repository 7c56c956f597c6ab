"""Upstream compatibility at load time: detects upstream signatures, and makes ``slime``'s modules importable.

A function has an upstream signature where the number of its parameters and the position of ``args`` are those with
which upstream calls it; any other function is left as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from miles.core.errors import HookError
from miles.hooks.compat import adapters, rollout
from miles.hooks.compat.types import UpstreamContext

Adapter = Callable[[Any, UpstreamContext], Any]


@dataclass(frozen=True, slots=True)
class UpstreamSignature:
    """A signature of upstream's and its adapter, or the address of one that needs torch.

    ``anchor`` is the parameter whose name is matched, beside their number; None matches by number alone. ``optional``
    parameters may be left out. ``is_class`` is the signature of a class's constructor.
    """

    names: tuple[str, ...]
    adapter: Adapter | str
    anchor: str | None = "args"
    optional: tuple[str, ...] = ()
    is_class: bool = False

    def matches(self, hook: Any) -> bool:
        """Whether ``hook`` can be called with these parameters."""
        if inspect.isclass(hook) != self.is_class and self.anchor != "args":
            return False
        try:
            parameters = list(inspect.signature(hook).parameters.values())
        except (TypeError, ValueError):
            return False
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
        required = [p for p in positional if p.default is p.empty]
        if len(positional) < len(self.names) or keyword_only:
            return False
        if self.anchor is not None and positional[self.names.index(self.anchor)].name != self.anchor:
            return False
        extra = [p.name for p in required[len(self.names) :]]
        return len(extra) <= len(self.optional) and all(name in self.optional for name in extra)

    def adapt(self, hook: Any, run: UpstreamContext) -> Any:
        """``hook`` under our protocol."""
        adapter = self.adapter
        if isinstance(adapter, str):
            module, _, name = adapter.partition(":")
            adapter = getattr(import_module(module), name)
        return adapter(hook, run)

    def __str__(self) -> str:
        parameters = ", ".join([*self.names, *(f"{name}=..." for name in self.optional)])
        return f"a class of ({parameters})" if self.is_class else f"({parameters})"


class _Keywords(UpstreamSignature):
    """A function that upstream calls with keywords: it may take any of ``names`` and must take the ``anchor``."""

    def matches(self, hook: Any) -> bool:
        try:
            parameters = inspect.signature(hook).parameters
        except (TypeError, ValueError):
            return False
        required = {p.name for p in parameters.values() if p.default is p.empty and p.kind < p.VAR_KEYWORD}
        required -= {p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL}
        return self.anchor in parameters and required <= {*self.names}


class _Agent(UpstreamSignature):
    """An agent of exactly these parameters: one with a fourth for the metadata is ours."""

    def matches(self, hook: Any) -> bool:
        try:
            parameters = inspect.signature(hook).parameters
        except (TypeError, ValueError):
            return False
        return [*parameters] == [*self.names]


_GROUPS = UpstreamSignature(("args", "groups"), adapters.adapt_sample_filter)
_ROLLOUT = ("args", "rollout_id", "data_source")
_LOSS = "miles.algo.hook_adapters:adapt_loss"
_TIS = ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")

UPSTREAM_SIGNATURES: Mapping[str, tuple[UpstreamSignature, ...]] = MappingProxyType(
    {
        "RolloutFn": (
            UpstreamSignature(_ROLLOUT, rollout.adapt_rollout, optional=("evaluation",)),
            UpstreamSignature(("input",), rollout.adapt_rollout, anchor=None, is_class=True),
        ),
        "EvalFn": (
            UpstreamSignature(_ROLLOUT, rollout.adapt_evaluation, optional=("evaluation",)),
            UpstreamSignature(("input",), rollout.adapt_evaluation, anchor=None, is_class=True),
        ),
        "Generate": (
            UpstreamSignature(("args", "sample", "sampling_params"), adapters.adapt_generate, optional=("evaluation",)),
            UpstreamSignature(("input",), adapters.adapt_generate, anchor=None),
        ),
        "AgentFn": (_Agent(("base_url", "prompt", "request_kwargs"), adapters.adapt_agent, anchor="base_url"),),
        "RewardFn": (UpstreamSignature(("args", "sample"), adapters.adapt_reward),),
        "GroupRewardFn": (UpstreamSignature(("args", "samples"), adapters.adapt_group_reward),),
        "Filter": (UpstreamSignature(("args", "samples"), adapters.adapt_filter),),
        "AdvantageFn": (UpstreamSignature(("args", "samples"), adapters.adapt_advantage_fn),),
        "AdvantageEstimator": (UpstreamSignature(("args", "samples"), adapters.adapt_advantage_estimator),),
        "SampleFilter": (_GROUPS,),
        "BufferFilter": (
            UpstreamSignature(("args", "rollout_id", "buffer", "num_samples"), adapters.adapt_buffer_filter),
        ),
        "DataBuffer": (UpstreamSignature(("input",), adapters.adapt_data_buffer, anchor=None, is_class=True),),
        "AllSamples": (
            UpstreamSignature(("args", "samples"), adapters.adapt_all_samples),
            UpstreamSignature(("args", "samples", "source"), adapters.adapt_all_samples),
        ),
        "PostProcess": (UpstreamSignature(("args", "rollout_data"), adapters.adapt_post_process),),
        "SamplePicker": (
            UpstreamSignature(("leaf_samples", "session_metadata"), adapters.adapt_sample_picker, anchor=None),
        ),
        "TrajectoryPostProcess": (
            UpstreamSignature(("leaf_samples", "session_metadata"), adapters.adapt_postprocessor, anchor=None),
        ),
        "RolloutLog": (
            UpstreamSignature(("rollout_id", "args", "samples", "metrics", "time"), adapters.adapt_rollout_log),
        ),
        "EvalLog": (UpstreamSignature(("rollout_id", "args", "data", "metrics"), adapters.adapt_eval_log),),
        "InitHook": (UpstreamSignature(("args",), adapters.adapt_init),),
        "BeforeLogProbsHook": (UpstreamSignature(("args", "model", "store_prefix"), adapters.adapt_before_log_probs),),
        "BeforeTrainStepHook": (
            UpstreamSignature(
                ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
                adapters.adapt_before_train_step,
            ),
        ),
        "PostSave": (
            UpstreamSignature(("args", "rollout_id", "checkpoint_dir", "hf_checkpoint_dir"), adapters.adapt_post_save),
        ),
        "PostWriteHook": (
            UpstreamSignature(("args", "version_dir", "rollout_engines"), "miles.sync.publish:adapt_post_write"),
        ),
        "DataSource": (UpstreamSignature(("args",), adapters.adapt_data_source),),
        "LossFn": (
            UpstreamSignature(("args", "batch", "logits", "sum_of_sample_mean"), _LOSS),
            UpstreamSignature(("args", "parallel_state", "batch", "logits", "sum_of_sample_mean"), _LOSS),
        ),
        "Correction": (_Keywords(_TIS, "miles.algo.hook_adapters:adapt_correction", anchor="pg_loss"),),
        "Reducer": (
            UpstreamSignature(
                ("total_lengths", "response_lengths", "loss_masks"),
                "miles.algo.hook_adapters:adapt_reducer",
                anchor="loss_masks",
                optional=("calculate_per_token_loss",),
            ),
        ),
    }
)
"""Protocol name -> the signatures upstream documents for it."""


def adapt_signature(hook: Any, protocol_name: str, run: UpstreamContext, source: str) -> Any:
    """Adapt ``hook`` to the protocol where it has an upstream signature; else return it as it is."""
    for signature in UPSTREAM_SIGNATURES.get(protocol_name, ()):
        if signature.matches(hook):
            _check_names(hook, protocol_name, source)
            return signature.adapt(hook, replace(run, source=source))
    return hook


def format_signatures(protocol_name: str) -> str:
    """The signatures of upstream's under a protocol, for error messages; empty where there are none."""
    return " or ".join(map(str, UPSTREAM_SIGNATURES.get(protocol_name, ())))


def _check_names(hook: Any, protocol_name: str, source: str) -> None:
    """Raise HookError for a reward of one sample where a group is scored, or the reverse."""
    wrong, fix = {
        "RewardFn": ("samples", "it is called with one sample; add --group-rm"),
        "GroupRewardFn": ("sample", "--group-rm calls it with a list of them; remove --group-rm"),
    }.get(protocol_name, ("", ""))
    parameter = inspect.signature(hook).parameters.get(wrong)
    if parameter is not None and "|" not in str(parameter.annotation) and "Union" not in str(parameter.annotation):
        raise HookError(f"{source} takes {wrong}, and {fix}.")


# -- slime ----------------------------------------------------------------------------------


class _SlimeFinder(MetaPathFinder, Loader):
    """Finds ``slime.x`` as ``miles.x``, the same module object."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != "slime":
            return None
        return ModuleSpec(fullname, self, is_package=True, origin=f"miles.{rest}" if rest else "miles")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = import_module(spec.origin)
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which was executed under its own name, its own spec back."""
        module.__spec__ = self._specs[module.__name__]


_FINDER = _SlimeFinder()


def install_slime_alias() -> None:
    """Make modules of ours importable by their names in slime, unless slime is installed."""
    if _FINDER not in sys.meta_path and find_spec("slime") is None:
        sys.meta_path.insert(0, _FINDER)  # before the search through the folder of the package it stands for
