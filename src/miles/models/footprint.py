"""What a decoder weighs and costs, from its spec alone: parameters, bytes and operations, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from miles.models.families.table import family_of
from miles.models.foreign.spec import ForeignSpec
from miles.models.layouts.names import NAMES
from miles.models.names import layer_parts, shape_of
from miles.models.pieces import Place
from miles.models.remembered import PerSequence, PerToken, remembered
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec, Mixer, MlaSpec, MoeSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Tokens a recurrent layer takes at once in training.
CHUNK = 64

# Adam's two moments in float32; low-precision weights also have a float32 master copy.
_MOMENT_BYTES = 8
_MASTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Size:
    """Parameters of a layer: all, those of its routed experts, and those a token is multiplied with, experts aside."""

    total: int
    routed: int
    products: int


@lru_cache(maxsize=256)
def _layer(layer: LayerSpec, width: int, family: str) -> _Size:
    parts = layer_parts(layer, width, Place("", "", {**NAMES, **family_of(family).names}))
    shapes = {name: shape_of(pieces) for name, pieces in parts.items()}
    experts = {f".moe.{name}" for name in ("gate_up", "up", "down", "gate_up_bias", "down_bias")}
    return _Size(
        total=sum(map(prod, shapes.values())),
        routed=sum(prod(shape) for name, shape in shapes.items() if name in experts),
        # A convolution's weight has three axes; norms, biases and sinks have one.
        products=sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in experts),
    )


def _share(layer: LayerSpec) -> float:
    """How much of a layer's experts one token meets."""
    return layer.ffn.experts_per_token / layer.ffn.num_experts if isinstance(layer.ffn, MoeSpec) else 0.0


def _vocabulary(spec: DecoderSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def parameter_count(spec: DecoderSpec) -> int:
    """All parameters; tied embeddings count once."""
    if isinstance(spec, ForeignSpec):
        return spec.parameters
    layers = sum(_layer(layer, spec.hidden_size, spec.family).total for layer in spec.layers)
    return layers + spec.hidden_size + _vocabulary(spec) * (1 if spec.tie_embeddings else 2)


def active_parameter_count(spec: DecoderSpec) -> int:
    """The parameters one token meets: all of them, but of the experts only those it is sent to."""
    if isinstance(spec, ForeignSpec):
        return spec.active
    idle = (_layer(layer, spec.hidden_size, spec.family).routed * (1 - _share(layer)) for layer in spec.layers)
    return parameter_count(spec) - round(sum(idle))


def weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """The weights in memory or on disk."""
    return parameter_count(spec) * BYTES[dtype]


def gradient_bytes(spec: DecoderSpec, dtype: str) -> int:
    """One gradient per weight, added up in float32 whatever the weights are."""
    return parameter_count(spec) * max(4, BYTES[dtype])


def optimizer_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Adam's state: two float32 moments, and a float32 master of weights kept in less."""
    return parameter_count(spec) * (_MOMENT_BYTES + (_MASTER_BYTES if BYTES[dtype] < 4 else 0))


def kv_bytes_per_token(spec: DecoderSpec, dtype: str) -> int:
    """What the engine remembers of one token in all layers."""
    kept = (remembered(layer.mixer) for layer in spec.layers)
    return sum(each.numbers for each in kept if isinstance(each, PerToken)) * BYTES[dtype]


def state_bytes_per_sequence(spec: DecoderSpec, dtype: str) -> int:
    """What the engine remembers of one sequence besides, whatever its length: the states of recurrent layers."""
    kept = (remembered(layer.mixer) for layer in spec.layers)
    return sum(
        prod(shape) * (4 if wide else BYTES[dtype])
        for each in kept
        if isinstance(each, PerSequence)
        for shape, wide in zip(each.shapes, each.wide, strict=True)
    )


def forward_flops_per_token(spec: DecoderSpec, context: float = 0.0) -> float:
    """Operations of the matrix products (a multiply and an add are two) one token takes, logits included.

    ``context`` is how many tokens came before it, on average. A training step costs three times as much.
    """
    products = float(_vocabulary(spec))
    looks = 0.0
    if isinstance(spec, ForeignSpec):  # all that is not the embedding is multiplied with, but for some vectors
        products = float(spec.active - (0 if spec.tie_embeddings else _vocabulary(spec)))
    for layer in spec.layers:
        looks += _mixing(layer.mixer, context)
        if not isinstance(spec, ForeignSpec):
            size = _layer(layer, spec.hidden_size, spec.family)
            products += size.products + size.routed * _share(layer)
    return 2.0 * products + looks


def _mixing(mixer: Mixer | None, context: float) -> float:
    """Operations by which a token looks at those before it."""
    match mixer:
        case AttentionSpec():
            seen = min(context, mixer.window or context, mixer.chunk or context)
            return 4.0 * seen * mixer.num_heads * mixer.head_dim
        case MlaSpec():
            index = mixer.indexer
            seen = context if index is None else min(context, index.top)
            scored = (
                0.0 if index is None or index.source is not None else 2.0 * context * index.num_heads * index.head_dim
            )
            return 2.0 * seen * mixer.num_heads * (mixer.head_dim + mixer.value_dim) + scored
        case DeltaSpec():
            within = 4.0 * mixer.key_heads * mixer.key_dim + 2.0 * mixer.value_heads * mixer.value_dim
            return 6.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim + within * CHUNK
        case MambaSpec():
            within = 2.0 * (mixer.groups * mixer.state_dim + mixer.num_heads * mixer.head_dim)
            return 4.0 * mixer.num_heads * mixer.head_dim * mixer.state_dim + within * CHUNK
        case None:
            return 0.0
