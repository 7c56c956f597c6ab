"""LoRA targets: the projections of a decoder that may have adapters, and those that have them. No torch.

Targets are the projections of attention (of any kind) and of dense MLPs, including shared experts. Routers, gates and
routed experts, which are stacked matrices here, have none. Those of a vision tower have adapters only if they are named
as such: ``vision``, ``vision.attn``, ``vision.mlp``, ``vision.projector``, or by their full names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles.core.errors import UsageError
from miles.models.checkpoint import param_map
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.optim_groups import is_projector_param
from miles.models.spec import DecoderSpec

ALL = "all-linear"
# Module of a layer -> the group name of its projections in --target-modules.
_GROUPS = {"attention": "attn", "mla": "attn", "delta": "attn", "mamba": "attn", "mlp": "mlp", "moe": "mlp"}
# The same for the vision tower, and its projectors.
VISION = "vision"
_VISION_GROUPS = {"attention": "vision.attn", "mlp": "vision.mlp"}
_PROJECTOR = "vision.projector"
# Small projections of a mixer that only select or scale.
_EXCLUDED = ("ba", "indexer")


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A projection with an adapter: its ``module`` name in the checkpoint, and its slice of a decoder parameter."""

    param_name: str
    piece: HfSlice
    group: str

    @property
    def module(self) -> str:
        return self.piece.hf_name.removesuffix(".weight")

    @property
    def is_vision(self) -> bool:
        """Whether it belongs to the vision tower or its projector."""
        return self.group.startswith(VISION)

    @property
    def short_name(self) -> str:
        """The last component of its name, such as q_proj."""
        return self.module.rpartition(".")[2]

    @property
    def outputs(self) -> int:
        return self.piece.shape[0]

    @property
    def inputs(self) -> int:
        return self.piece.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapters of a model: rank, alpha and targets."""

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(self.rank * (target.inputs + target.outputs) for target in self.targets)

    @property
    def num_base_parameters(self) -> int:
        """Number of values of the matrices with adapters."""
        return sum(target.inputs * target.outputs for target in self.targets)


def list_targets(spec: DecoderSpec) -> tuple[LoraTarget, ...]:
    """List every projection that may have an adapter, in the decoder's order."""
    if isinstance(spec, HfAdapterSpec):
        return ()
    targets: list[LoraTarget] = []
    for name, slices in param_map.build_param_map(spec).items():
        group = _group(name)
        if group is not None:
            targets += [
                LoraTarget(name, piece, group)
                for piece in slices
                if not piece.transposed and piece.hf_name.endswith(".weight")
            ]
    return tuple(targets)


def select_targets(spec: DecoderSpec, include: str | None, exclude: str | None) -> tuple[LoraTarget, ...]:
    """Select the targets that ``--target-modules`` names and ``--exclude-modules`` does not; UsageError for unknown
    names.
    """
    candidates = list_targets(spec)
    if not candidates:
        raise UsageError("this model has no projection that LoRA adapters can be added to.")
    words = _words(include) or [ALL]
    excluded = _words(exclude)
    for flag, names in (("--target-modules", words), ("--exclude-modules", excluded)):
        for word in names:
            if word != ALL and not any(_matches(target, word) for target in candidates):
                raise UsageError(
                    f"{flag} {word} names no projection of this model; choose among {_list_names(candidates)}."
                )
    included = [t for t in candidates if any((word == ALL and not t.is_vision) or _matches(t, word) for word in words)]
    selected = tuple(t for t in included if not any(_matches(t, word) for word in excluded))
    if not selected:
        raise UsageError("--exclude-modules leaves no projection with an adapter; exclude fewer modules.")
    return selected


def targets_from_modules(spec: DecoderSpec, modules: Iterable[str]) -> tuple[LoraTarget, ...]:
    """Return the targets of these module names, in the decoder's order; UsageError if one is unknown."""
    by_name = {target.module: target for target in list_targets(spec)}
    wanted = set(modules)
    unknown = sorted(wanted - by_name.keys())
    if unknown:
        raise UsageError(f"it has an adapter of {unknown[0]}, which is not a LoRA target of this model.")
    return tuple(target for module, target in by_name.items() if module in wanted)


def peft_target_modules(spec: DecoderSpec, targets: Iterable[LoraTarget]) -> list[str]:
    """Return PEFT's ``target_modules``: short names if these match no other tensor, else full names."""
    own = {target.module for target in targets}
    short = {module.rpartition(".")[2] for module in own}
    candidates = {
        p.hf_name.removesuffix(".weight") for pieces in param_map.build_param_map(spec).values() for p in pieces
    }
    clear = {module for module in candidates if module.rpartition(".")[2] in short} == own
    return sorted(short if clear else own)


def _group(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == VISION:
        return _vision_group(name, parts)
    if len(parts) < 5 or parts[0] != "layers" or parts[-1] != "weight":
        return None
    kind, inner = parts[2], parts[3:-1]
    if any(part in _EXCLUDED or part.endswith("norm") for part in inner) or (kind == "moe" and inner[0] != "shared"):
        return None
    return _GROUPS.get(kind)


def _vision_group(name: str, parts: list[str]) -> str | None:
    if parts[-1] != "weight" or parts[-2].endswith("norm") or parts[1] == "patch_embed":
        return None
    if is_projector_param(name):
        return _PROJECTOR
    return _VISION_GROUPS.get(parts[3]) if parts[1] == "blocks" else None


def _matches(target: LoraTarget, word: str) -> bool:
    if target.is_vision:
        return word in (VISION, target.group, target.module)
    return word in (target.group, target.short_name) or target.module == word or target.module.endswith(f".{word}")


def _words(names: str | None) -> list[str]:
    return [] if names is None else [word.strip() for word in names.split(",") if word.strip()]


def _list_names(candidates: Iterable[LoraTarget]) -> str:
    names = ((t.group,) if t.is_vision else (t.group, t.short_name) for t in candidates)
    return ", ".join(dict.fromkeys(word for own in names for word in own))
