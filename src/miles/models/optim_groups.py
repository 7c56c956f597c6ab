"""Muon-eligible parameters: matrices between hidden channels, and the matrices inside fused projections. No torch.

Embeddings, heads, norms, biases, convolutions, routers and other narrow gates are excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from miles.models.checkpoint.param_map import build_param_map, param_shape
from miles.models.checkpoint.param_slices import Shape
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import AttentionSpec, DecoderSpec, GatedDeltaNetSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec

# Rows of one matrix fused a fused tensor: start, stop, step.
Rows = tuple[int, int, int]

# Their outputs select, gate or scale: few rows, each with a meaning of its own.
_NARROW = ("router.weight", "delta.ba.weight", "shared_gate.weight", "indexer.weights_proj.weight")


@dataclass(frozen=True, slots=True)
class MuonMatrices:
    """A parameter of ``shape`` whose last two dimensions are matrices: those of ``rows``, concatenated.

    A third dimension in front counts experts.
    """

    shape: Shape
    rows: tuple[Rows, ...]


@lru_cache(maxsize=8)
def find_muon_matrices(spec: DecoderSpec) -> Mapping[str, MuonMatrices]:
    """Find every such parameter of the full decoder; empty for a model computed by transformers."""
    if isinstance(spec, HfAdapterSpec):
        return {}
    out: dict[str, MuonMatrices] = {}
    for name, parts in build_param_map(spec).items():
        shape = param_shape(parts)
        _, layers, rest = name.partition("layers.")
        if not layers or name.endswith(_NARROW) or name.endswith("bias") or len(shape) < 2 or ".conv" in name:
            continue
        number, _, own = rest.partition(".")
        fused = _split_fused(spec.layers[int(number)], own)
        out[name] = MuonMatrices(shape, fused if fused is not None else ((0, shape[-2], 1),))
    return out


def _split_fused(layer: LayerSpec, name: str) -> tuple[Rows, ...] | None:
    """Return the matrices of a fused projection; None if it is a single matrix."""
    match name.removesuffix(".weight").split("."), layer.mixer, layer.ffn:
        case ["attention", "qkv"], AttentionSpec() as mixer, _:
            keys = mixer.num_kv_heads * mixer.head_dim
            return _consecutive(mixer.num_heads * mixer.head_dim * (2 if mixer.gated else 1), keys, keys)
        case ["delta", "qkvz"], GatedDeltaNetSpec(fused=False) as mixer, _:
            keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
            return _consecutive(keys, keys, values, values)
        case ["mamba", "input"], MambaSpec() as mixer, _:
            inner, state = mixer.num_heads * mixer.head_dim, mixer.groups * mixer.state_dim
            return _consecutive(inner, inner, state, state, mixer.num_heads)
        case ["mlp", "gate_up"], _, MlpSpec() as ffn:
            return _consecutive(ffn.size, ffn.size)
        case ["moe", "gate_up"], _, MoeSpec() as ffn:
            twice = 2 * ffn.size
            return ((0, twice, 2), (1, twice, 2)) if ffn.interleaved else _consecutive(ffn.size, ffn.size)
        case ["moe", "shared", "gate_up"], _, MoeSpec(shared=MlpSpec() as shared):
            return _consecutive(shared.size, shared.size)
    return None


def _consecutive(*sizes: int) -> tuple[Rows, ...]:
    rows: list[Rows] = []
    start = 0
    for size in sizes:
        rows.append((start, start + size, 1))
        start += size
    return tuple(rows)
