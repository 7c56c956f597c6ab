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
from miles.models.shard import spec_of_rank
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MambaSpec, Mixer, MlaSpec, MoeSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Tokens a recurrent layer takes at once in training.
CHUNK = 64

# Adam's two moments in float32; low-precision weights also have a float32 master copy.
_MOMENT_BYTES = 8
_MASTER_BYTES = 4


# Parameters with an expert a row of dimension 0.
_EXPERTS = frozenset(f".moe.{name}" for name in ("gate_up", "up", "down", "gate_up_bias", "down_bias"))
# Parameters too short to be cut.
_SHORT = frozenset({".moe.correction"})

# Numbers of a moment that share a scale where they are kept in eight bits, and how many there must be.
_CODED_BLOCK = 256
_CODED_SMALLEST = 4096


@dataclass(frozen=True, slots=True)
class _Size:
    """Parameters of a layer: all, those of its routed experts, and those a token is multiplied with, experts aside."""

    total: int
    routed: int
    products: int


@lru_cache(maxsize=256)
def _layer(layer: LayerSpec, width: int, family: str) -> _Size:
    shapes = _shapes(layer, width, family)
    return _Size(
        total=sum(map(prod, shapes.values())),
        routed=sum(prod(shape) for name, shape in shapes.items() if name in _EXPERTS),
        # A convolution's weight has three axes; norms, biases and sinks have one.
        products=sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name not in _EXPERTS),
    )


def _shapes(layer: LayerSpec, width: int, family: str) -> dict[str, tuple[int, ...]]:
    """A layer's parameters by what their names end in."""
    parts = layer_parts(layer, width, Place("", "", {**NAMES, **family_of(family).names}))
    return {name: tuple(shape_of(pieces)) for name, pieces in parts.items()}


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


# -- what one of several ranks holds --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Over how many ranks parameters are cut.

    Heads, channels and the vocabulary are cut over ``tensor`` ranks; rows of what is left over ``pieces``, among which
    ``expert`` ranks share the experts. There are ``copies`` of it all.
    """

    tensor: int = 1
    expert: int = 1
    pieces: int = 1
    copies: int = 1

    @property
    def sharded(self) -> bool:
        """Are parameters brought together layer by layer? Then what is kept of them is float32."""
        return self.pieces * self.copies > 1


@dataclass(frozen=True, slots=True)
class Kept:
    """Numbers of one parameter that the fullest rank keeps, and how many it has when they are brought together."""

    name: str
    count: int
    together: int
    axes: int


def kept_by_rank(spec: DecoderSpec, cut: Cut) -> tuple[Kept, ...]:
    """Every parameter, as one of the ranks has it; tied embeddings once."""
    if isinstance(spec, ForeignSpec):
        return (Kept("", -(-spec.parameters // cut.pieces), spec.parameters, 2),)
    small = spec_of_rank(spec, cut.tensor)
    vocabulary = (small.vocab_size, small.hidden_size)
    shapes = {"embedding.weight": vocabulary, "norm.weight": (small.hidden_size,)}
    if not small.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    around = tuple(_kept(name, shape, cut) for name, shape in shapes.items())
    return around + tuple(
        Kept(f"layers.{i}{one.name}", one.count, one.together, one.axes)
        for i, layer in enumerate(small.layers)
        for one in _kept_of_layer(layer, small.hidden_size, small.family, cut)
    )


@lru_cache(maxsize=256)
def _kept_of_layer(layer: LayerSpec, width: int, family: str, cut: Cut) -> tuple[Kept, ...]:
    return tuple(_kept(name, shape, cut) for name, shape in _shapes(layer, width, family).items())


def _kept(name: str, shape: tuple[int, ...], cut: Cut) -> Kept:
    world, dim = cut.pieces, 0
    if name in _EXPERTS and cut.expert > 1:
        shape, world = (-(-shape[0] // cut.expert), *shape[1:]), cut.pieces // cut.expert
        # Whole experts, or their rows where these come out even and experts do not.
        dim = 1 if shape[0] % world and shape[1] % world == 0 else 0
    together = prod(shape)
    if name in _SHORT:
        return Kept(name, together, together, len(shape))
    return Kept(name, together // shape[dim] * -(-shape[dim] // world), together, len(shape))


def rank_bytes(spec: DecoderSpec, cut: Cut, dtype: str, *, trained: bool = True) -> int:
    """The parameters a rank keeps: in float32 where they are brought together in another precision to be trained.

    Without anybody to share rows with, they are in ``dtype``.
    """
    size = 4 if cut.sharded and trained else BYTES[dtype]
    return sum(one.count for one in kept_by_rank(spec, cut)) * size


def rank_gradient_bytes(spec: DecoderSpec, cut: Cut) -> int:
    """One float32 gradient for each number a rank keeps."""
    return 4 * sum(one.count for one in kept_by_rank(spec, cut))


def rank_optimizer_bytes(
    spec: DecoderSpec, cut: Cut, dtype: str, *, moments: str = "float32", optimizer: str = "adam"
) -> int:
    """Two moments of each number a rank keeps, or one of matrices within layers under Muon; and masters.

    What is kept in float32 already is its own master.
    """
    total = 0
    for one in kept_by_rank(spec, cut):
        within = one.name.startswith("layers.") and one.axes > 1 and not one.name.endswith("bias")
        total += (1 if optimizer == "muon" and within else 2) * moment_bytes(one.count, moments)
        total += 0 if cut.sharded or BYTES[dtype] >= 4 else _MASTER_BYTES * one.count
    return total


def moment_bytes(count: int, form: str) -> int:
    if form == "int8":
        return 4 * count if count < _CODED_SMALLEST else count + 4 * -(-count // _CODED_BLOCK)
    return (4 if form == "float32" else 2) * count


def gathered_bytes(spec: DecoderSpec, cut: Cut, dtype: str) -> int:
    """What is brought together for a moment: this layer's parameters, the next one's, and gradients on their way.

    Embedding, last norm and head stay together for the whole of a step. A layer's are there three times (as they come,
    as they are used, and the next layer's), its gradients in the model's precision and once more in float32.
    """
    if not cut.sharded:
        return 0
    size, kept = BYTES[dtype], kept_by_rank(spec, cut)
    layers: dict[str, int] = {}
    around = 0
    for one in kept:
        if one.name.startswith("layers."):
            layer = one.name.split(".", 2)[1]
            layers[layer] = layers.get(layer, 0) + one.together
        else:
            around += one.together
    return around * (2 * size + 4) + max(layers.values(), default=0) * (4 * size + 4)


# -- what an engine remembers, and what a token costs ----------------------------------------


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
