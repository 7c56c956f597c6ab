"""Which parameters are matrices between hidden channels, and which matrices lie in a fused one. No torch.

An optimizer that works on whole matrices (Muon) takes these; embeddings, heads, norms, biases, convolutions, routers
and other narrow gates are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from miles.models.foreign.spec import ForeignSpec
from miles.models.names import pieces, shape_of
from miles.models.pieces import Shape
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec

# Rows of one of the matrices of a tensor: first, behind the last, and how far apart.
Rows = tuple[int, int, int]

# Their outputs choose, gate or scale: a handful of rows, each of which means something by itself.
_NARROW = ("router.weight", "delta.ba.weight", "shared_gate.weight", "indexer.weights_proj.weight")


@dataclass(frozen=True, slots=True)
class Matrices:
    """A parameter of ``shape``, the last two axes of which are matrices: those of ``rows``, one below the other.

    A third axis in front counts experts.
    """

    shape: Shape
    rows: tuple[Rows, ...]


@lru_cache(maxsize=8)
def matrices(spec: DecoderSpec) -> Mapping[str, Matrices]:
    """Every such parameter of the whole decoder, by our names; none of a model whose inside is not ours."""
    if isinstance(spec, ForeignSpec):
        return {}
    out: dict[str, Matrices] = {}
    for name, parts in pieces(spec).items():
        shape = shape_of(parts)
        _, layers, rest = name.partition("layers.")
        if not layers or name.endswith(_NARROW) or name.endswith("bias") or len(shape) < 2 or ".conv" in name:
            continue
        number, _, own = rest.partition(".")
        inside = _inside(spec.layers[int(number)], own)
        out[name] = Matrices(shape, inside if inside is not None else ((0, shape[-2], 1),))
    return out


def _inside(layer: LayerSpec, name: str) -> tuple[Rows, ...] | None:
    """The matrices of a fused projection; None where it is one."""
    match name.removesuffix(".weight").split("."), layer.mixer, layer.ffn:
        case ["attention", "qkv"], AttentionSpec() as mixer, _:
            keys = mixer.num_kv_heads * mixer.head_dim
            return _below(mixer.num_heads * mixer.head_dim * (2 if mixer.gated else 1), keys, keys)
        case ["delta", "qkvz"], DeltaSpec(fused=False) as mixer, _:
            keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
            return _below(keys, keys, values, values)
        case ["mamba", "input"], MambaSpec() as mixer, _:
            inner, state = mixer.num_heads * mixer.head_dim, mixer.groups * mixer.state_dim
            return _below(inner, inner, state, state, mixer.num_heads)
        case ["mlp", "gate_up"], _, MlpSpec() as ffn:
            return _below(ffn.size, ffn.size)
        case ["moe", "gate_up"], _, MoeSpec() as ffn:
            twice = 2 * ffn.size
            return ((0, twice, 2), (1, twice, 2)) if ffn.interleaved else _below(ffn.size, ffn.size)
        case ["moe", "shared", "gate_up"], _, MoeSpec(shared=MlpSpec() as shared):
            return _below(shared.size, shared.size)
    return None


def _below(*sizes: int) -> tuple[Rows, ...]:
    rows: list[Rows] = []
    start = 0
    for size in sizes:
        rows.append((start, start + size, 1))
        start += size
    return tuple(rows)
