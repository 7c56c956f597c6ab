"""Keys of Megatron's distributed checkpoints (torch_dist): where the tensors of a decoder are in its files.

They are those of Megatron's modules, also where a model of the same spec has the decoder's for the sake of adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from miles.backends.megatron.module_choice import choose_modules, has_stacked_layers
from miles.backends.megatron.param_mapping import build_param_mappings, checkpoint_names, parse_layer_index
from miles.models.spec import DecoderSpec

VOCABULARY = ("embedding.weight", "lm_head.weight")
"""Parameters with a row per token, which files may pad."""

_EXPERT_KEY = {
    "mlp.experts.local_experts.{}.linear_fc1.weight": "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.local_experts.{}.linear_fc2.weight": "mlp.experts.experts.linear_fc2.weight",
}
# Modules that have an entry besides their tensors, empty without FP8, which Megatron expects in a checkpoint.
_EXTRA_STATE = re.compile(r"(.*linear_[a-z0-9_]+)\.weight")
_CORE_ATTENTION = "self_attention.core_attention"


@dataclass(frozen=True, slots=True)
class ExtraState:
    """An entry that is no tensor: number ``index`` of ``count`` entries of a key."""

    key: str
    index: int
    count: int


def list_keys(spec: DecoderSpec, name: str) -> tuple[list[str], int | None]:
    """Return the keys of a parameter, and its place in stacked layers, which is how Megatron stores layers of one kind.

    A norm has two keys, one where Transformer Engine fuses it into the next projection, which is the second.
    """
    layer, names = parse_layer_index(name), _list_key_names(spec, name)
    if layer is None:
        return list(names), None
    if has_stacked_layers(spec):
        return [f"decoder.layers.{each}" for each in names], layer
    return [f"decoder.layers.{layer}.{each}" for each in names], None


def list_possible_keys(spec: DecoderSpec, name: str) -> list[str]:
    """Return the keys of a parameter in any program's checkpoint, which may stack layers or not."""
    layer, names = parse_layer_index(name), _list_key_names(spec, name)
    if layer is None:
        return list(names)
    return [f"decoder.layers.{middle}{each}" for each in names for middle in ("", f"{layer}.")]


def list_extra_states(spec: DecoderSpec) -> Iterator[ExtraState]:
    """List the entries of modules besides their tensors."""
    seen: set[ExtraState] = set()
    own, stacked = choose_modules(spec), has_stacked_layers(spec)
    for name, mapping in build_param_mappings(spec, transformer_engine=False).items():
        layer = parse_layer_index(name)
        if layer is None or own.has_param(name):
            continue
        modules = [found[1] for key in _list_key_names(spec, name) if (found := _EXTRA_STATE.fullmatch(key))]
        count = mapping.shape[0] if mapping.expert else 1
        for module in [*modules, *([_CORE_ATTENTION] if layer not in own.mixers else [])]:
            for number in range(count):
                place = (layer, spec.num_layers) if stacked else (number, count)
                middle = "" if stacked else f"{layer}."
                state = ExtraState(f"decoder.layers.{middle}{module}._extra_state", *place)
                if state not in seen:
                    seen.add(state)
                    yield state


def _list_key_names(spec: DecoderSpec, name: str) -> tuple[str, ...]:
    names = checkpoint_names(spec, name)
    return (_EXPERT_KEY[names[0]],) if names[0] in _EXPERT_KEY else names
