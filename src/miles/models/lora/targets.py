"""LoRA targets: the projections of a decoder that may have adapters, and those that have them. No torch.

Targets are the projections of attention (of any kind), of dense MLPs, including shared experts, and of routed experts.
Routers and gates have none. ``all-linear`` is all of them but the routed experts, which are named ``experts``, by their
projections (``gate_proj``) or by wildcards. The output layer is a target only if it is named ``lm_head``. Those of a
vision tower have adapters only if they are named as such: ``vision``, ``vision.attn``, ``vision.mlp``,
``vision.projector``, or by their full names.

If the embeddings are tied, the output layer has no weight of its own: its adapter changes the logits, and not the
embedding.

The experts of a layer are one target with one pair of factors per expert. With shared outer factors all experts of a
layer have one A of gate and up projections, and one B of down projections.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod, sqrt

from miles.core.errors import UsageError
from miles.models.checkpoint import param_map
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.optim_groups import is_projector_param
from miles.models.spec import DecoderSpec

ALL = "all-linear"
# Module of a layer -> the group name of its projections in --target-modules.
_GROUPS = {
    "attention": "attn",
    "relative": "attn",
    "mla": "attn",
    "compressed": "attn",
    "delta": "attn",
    "kda": "attn",
    "mamba": "attn",
    "short_conv": "attn",
    "mlp": "mlp",
    "moe": "mlp",
}
# The same for the vision tower, and its projectors.
VISION = "vision"
_VISION_GROUPS = {"attention": "vision.attn", "mlp": "vision.mlp"}
_PROJECTOR = "vision.projector"
# Small projections of a mixer that only select or scale; the compressor and the output projection in groups.
_EXCLUDED = ("ba", "b", "f_a", "f_b", "g_a", "g_b", "gate", "indexer", "compressor", "output_groups")
EXPERTS = "experts"
# The output layer: its group, its short name, and its parameter in a decoder, whose weight may be the embedding's.
LM_HEAD = "lm_head"
LM_HEAD_PARAM = "lm_head.weight"
_EXPERT_PARAMS = ("gate_up", "up", "down")
# Megatron's names of a layer's matrices: module of a layer -> matrix -> name.
_MEGATRON_ATTENTION = {"qkv": "linear_qkv", "output": "linear_proj"}
_MEGATRON_MLP = {"gate_up": "linear_fc1", "up": "linear_fc1", "down": "linear_fc2"}
_MEGATRON_NAMES = {
    "attention": _MEGATRON_ATTENTION,
    "relative": _MEGATRON_ATTENTION,
    "mla": {
        "q": "linear_q_proj",
        "q_a": "linear_q_down_proj",
        "q_b": "linear_q_up_proj",
        "kv_a": "linear_kv_down_proj",
        "kv_b": "linear_kv_up_proj",
        "output": "linear_proj",
    },
    "delta": {"qkvz": "in_proj", "output": "out_proj"},
    "kda": _MEGATRON_ATTENTION,
    "mamba": {"input": "in_proj", "output": "out_proj"},
    "short_conv": {"input": "in_proj", "output": "out_proj"},
    "mlp": _MEGATRON_MLP,
    "moe": _MEGATRON_MLP,
}
# What only a regular expression has; module names and wildcards have none of it.
_REGEX = re.compile(r"[\\^$()\[\]|+?{}]|^\.\*")


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A projection with an adapter: its ``module`` name in the checkpoint, and its slice of a decoder parameter.

    Of routed experts that the checkpoint has one by one, ``experts`` are the slices of all of them, and ``piece`` that
    of the first.
    """

    param_name: str
    piece: HfSlice
    group: str
    experts: tuple[HfSlice, ...] = ()

    @property
    def module(self) -> str:
        """Its name; an asterisk is in the place of the experts' numbers."""
        name = self.piece.hf_name.removesuffix(".weight")
        if not self.experts:
            return name
        last = self.experts[-1].hf_name.removesuffix(".weight").split(".")
        own = name.split(".")
        number = max(i for i, (one, other) in enumerate(zip(own, last, strict=True)) if one != other or one == "0")
        return ".".join([*own[:number], "*", *own[number + 1 :]])

    @property
    def modules(self) -> tuple[str, ...]:
        """The names in the checkpoint: one, or one for each expert."""
        return tuple(piece.hf_name.removesuffix(".weight") for piece in self.experts or (self.piece,))

    @property
    def num_experts(self) -> int:
        """Number of its matrices, of experts; 0 if it is one matrix."""
        return len(self.experts) or (self.piece.shape[0] if len(self.piece.shape) == 3 else 0)

    @property
    def magnitude_shape(self) -> tuple[int, ...]:
        """Shape of its magnitudes (DoRA): one for every output, of every expert."""
        return (self.num_experts, self.outputs) if self.num_experts else (self.outputs,)

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint has all experts in one tensor."""
        return len(self.piece.shape) == 3

    @property
    def is_vision(self) -> bool:
        """Whether it belongs to the vision tower or its projector."""
        return self.group.startswith(VISION)

    @property
    def is_head(self) -> bool:
        """Whether it is the output layer."""
        return self.group == LM_HEAD

    @property
    def owner(self) -> str:
        """The module that a stacked tensor is a parameter of, for PEFT."""
        return self.piece.hf_name.rpartition(".")[0]

    @property
    def short_name(self) -> str:
        """The last component of its name, such as q_proj."""
        return self.module.rpartition(".")[2]

    @property
    def megatron_name(self) -> str | None:
        """The name that Megatron has for the decoder's matrix, such as linear_qkv."""
        if self.is_head:
            return "output_layer"
        parts = self.param_name.removesuffix(".weight").split(".")
        return _MEGATRON_NAMES.get(parts[2], {}).get(parts[-1]) if parts[0] == "layers" else None

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of the decoder's matrix, or of that of each expert, which it is."""
        if self.is_stacked:
            return self.piece.matrix_rows or (0, self.outputs)
        return self.piece.start, self.piece.stop

    @property
    def outputs(self) -> int:
        return self.piece.shape[-1] if self.piece.transposed else self.piece.shape[-2]

    @property
    def inputs(self) -> int:
        return self.piece.shape[-2] if self.piece.transposed else self.piece.shape[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """The adapters of a model: rank, alpha and targets.

    ``shared_outer``: all experts of a layer share the factor that is at the layer's input or output. ``use_rslora``:
    the scale is alpha over the square root of the rank. ``use_dora``: the magnitude of every output is trained too.
    ``dropout`` is the probability with which inputs of the adapters are dropped in training. ``unmerged``: they are
    applied beside the weights, also if these are not packed.
    """

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]
    shared_outer: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    dropout: float = 0.0
    unmerged: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)

    def factor_shapes(self, target: LoraTarget) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a target's factors: [r, I] and [O, r], of experts [E, r, I] and [E, O, r]."""
        a_rI, b_Or = (self.rank, target.inputs), (target.outputs, self.rank)
        if not target.num_experts:
            return a_rI, b_Or
        is_down = target.param_name.endswith(".down")
        count_a = 1 if self.shared_outer and not is_down else target.num_experts
        count_b = 1 if self.shared_outer and is_down else target.num_experts
        return (count_a, *a_rI), (count_b, *b_Or)

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(prod(shape) for shape in self.list_shapes())

    def list_shapes(self) -> list[tuple[int, ...]]:
        """List the shapes of all trained tensors."""
        shapes = [shape for target in self.targets for shape in self.factor_shapes(target)]
        return shapes + ([target.magnitude_shape for target in self.targets] if self.use_dora else [])

    @property
    def num_base_parameters(self) -> int:
        """Number of values of the matrices with adapters."""
        return sum(target.inputs * target.outputs * max(1, target.num_experts) for target in self.targets)


def list_targets(spec: DecoderSpec) -> tuple[LoraTarget, ...]:
    """List every projection that may have an adapter, in the decoder's order."""
    if isinstance(spec, HfAdapterSpec):
        return tuple(
            LoraTarget(f"{module}.weight", HfSlice(f"{module}.weight", shape, 0, shape[0]), _guess_group(module))
            for module, shape in spec.linears
        )
    targets: list[LoraTarget] = []
    for name, slices in param_map.build_param_map(spec).items():
        group = _group(name)
        if group == EXPERTS:
            targets += _list_expert_targets(name, slices)
        elif group is not None:
            targets += [
                LoraTarget(name, piece, group)
                for piece in slices
                if not piece.transposed and piece.hf_name.endswith(".weight")
            ]
    return (*targets, LoraTarget(LM_HEAD_PARAM, param_map.map_lm_head(spec), LM_HEAD))


def _guess_group(module: str) -> str:
    """Return the group of a linear layer of a transformers module, by its name."""
    return "attn" if "attn" in module or "attention" in module else "mlp"


def _list_expert_targets(name: str, slices: Iterable[HfSlice]) -> list[LoraTarget]:
    """List the projections of a layer's experts, each once for all experts."""
    experts: dict[int, list[HfSlice]] = {}
    for piece in slices:
        first = piece.matrix_rows[0] if piece.matrix_rows is not None else 0
        experts.setdefault(piece.start if piece.expert is not None else first, []).append(piece)
    return [
        LoraTarget(name, pieces[0], EXPERTS, tuple(pieces) if pieces[0].expert is not None else ())
        for pieces in experts.values()
    ]


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
    included = [t for t in candidates if any(_matches(t, word) for word in words)]
    selected = tuple(t for t in included if not any(_matches(t, word) for word in excluded))
    if not selected:
        raise UsageError("--exclude-modules leaves no projection with an adapter; exclude fewer modules.")
    return selected


def targets_from_modules(spec: DecoderSpec, modules: Iterable[str]) -> tuple[LoraTarget, ...]:
    """Return the targets of these module names, in the decoder's order; UsageError if one is unknown, or if it is that
    of some experts of a layer only.

    All experts of a projection may also be named at once, as ``LoraTarget.module`` does.
    """
    wanted = set(modules)
    found: list[LoraTarget] = []
    for target in list_targets(spec):
        names = set(target.modules)
        if target.module not in wanted and not names & wanted:
            continue
        if target.module not in wanted and not names <= wanted:
            missing = min(names - wanted)
            raise UsageError(
                f"it has adapters of some experts only: {missing} has none; all experts of a layer need one."
            )
        wanted -= {target.module, *names}
        found.append(target)
    if wanted:
        raise UsageError(f"it has an adapter of {min(wanted)}, which is not a LoRA target of this model.")
    return tuple(found)


def peft_target_modules(spec: DecoderSpec, targets: Iterable[LoraTarget]) -> list[str]:
    """Return PEFT's ``target_modules``: short names if these match no other tensor, else full names.

    Experts that are one tensor in the checkpoint are not modules (``peft_target_parameters``).
    """
    own = {module for target in targets if not target.is_stacked for module in target.modules}
    short = {module.rpartition(".")[2] for module in own}
    if isinstance(spec, HfAdapterSpec):  # it does not list all modules, so that short names may match others
        return sorted(own)
    candidates = {
        p.hf_name.removesuffix(".weight") for pieces in param_map.build_param_map(spec).values() for p in pieces
    }
    clear = {module for module in candidates | own if module.rpartition(".")[2] in short} == own
    return sorted(short if clear else own)


def peft_target_parameters(targets: Iterable[LoraTarget]) -> list[str]:
    """Return PEFT's ``target_parameters``: the names of experts that are one tensor in the checkpoint."""
    return sorted(target.piece.hf_name for target in targets if target.is_stacked)


def _group(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == VISION:
        return _vision_group(name, parts)
    if len(parts) == 4 and parts[2] == "moe" and parts[3] in _EXPERT_PARAMS:
        return EXPERTS
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
    """Whether a word of --target-modules names a target: a group, a name in full or its end, with wildcards, Megatron's
    name, or a regular expression for full names. Wildcards do not match the output layer.
    """
    if word == ALL:
        return target.group != EXPERTS and not target.is_vision and not target.is_head
    if target.is_vision:
        return word in (VISION, target.group, target.module)
    if target.is_head:
        return word in (target.short_name, target.module, target.megatron_name) or _matches_regex(target.module, word)
    if word in (target.group, target.short_name, target.megatron_name):
        return True
    if _matches_name(target.module, word):
        return True
    found = [_matches_name(name, word) for name in target.modules]
    if any(found) and not all(found):
        raise UsageError(
            f"{word} names some experts of {target.module} only, but all experts of a layer have adapters or none; "
            f"name them {target.module}."
        )
    return all(found)


def _matches_regex(name: str, word: str) -> bool:
    return _REGEX.search(word) is not None and re.fullmatch(word, name) is not None


def _matches_name(name: str, word: str) -> bool:
    if _REGEX.search(word):
        return _matches_regex(name, word)
    return fnmatchcase(name, word) or fnmatchcase(name, f"*.{word}")


def _words(names: str | None) -> list[str]:
    """Split at commas, except a regular expression, which is one word, as a string of ``target_modules`` is in PEFT."""
    if names is None:
        return []
    if _REGEX.search(names):
        try:
            re.compile(names)
        except re.error as error:
            raise UsageError(
                f"{names} is no valid regular expression of module names ({error}); see --target-modules."
            ) from error
        return [names]
    return [word.strip() for word in names.split(",") if word.strip()]


def _list_names(candidates: Iterable[LoraTarget]) -> str:
    names = ((t.group,) if t.is_vision else (t.group, t.short_name) for t in candidates)
    return ", ".join(dict.fromkeys(word for own in names for word in own))
