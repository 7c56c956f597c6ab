"""Parameter counts, weight and optimizer bytes, and FLOPs of a decoder, from its spec. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from miles.kernels.numerics import FAST, Numerics
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout, list_states
from miles.models.checkpoint.hf_names import HF_NAMES
from miles.models.checkpoint.param_map import (
    build_layer_map,
    map_altup_streams,
    map_hyper_head,
    map_per_layer_input,
    param_shape,
)
from miles.models.checkpoint.param_slices import ModuleNames
from miles.models.checkpoint.vision_names import map_vision
from miles.models.families.registry import find_family
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, is_muon_param, is_untrained_param
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.quantization import find_quantized_layer, fused_segments, quantizes_layer
from miles.models.residual_spec import HyperConnectionSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MoeSpec,
    PoolIndexerSpec,
    RecurrentMixer,
    RelativeAttentionSpec,
    ShortConvSpec,
)
from miles.models.vision.spec import VisionSpec
from miles.precision.formats import QuantizationSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Chunk length of recurrent layers in training.
CHUNK = 64

# Adam: two float32 moments, and float32 master weights for low-precision weights.
_MOMENT_BYTES = 8
_MASTER_BYTES = 4


# Parameters with one expert per row of dimension 0.
_EXPERTS = frozenset(f".moe.{name}" for name in ("gate_up", "up", "down", "gate_up_bias", "down_bias"))
# Stacked experts that every token uses.
_SHARED = ".moe.shared_experts."
# Matrices that are added to values.
_ADDED = (".indexer.pool_bias", ".position_bias", ".relative.profiles")
# Tables that are looked up: one of integers, and one of n-grams.
_TABLE = ".moe.expert_table"
_TABLES = (_TABLE, ".ngram.table.weight")
# Parameters that are not sharded, and the bytes of a value of these, whatever the model's dtype.
_FIXED_BYTES = {
    ".moe.correction": 4,
    _TABLE: 8,
    ".ngram.multipliers": 8,
    ".ngram.sizes": 8,
    ".ngram.offsets": 8,
}

# 8-bit optimizer state: values that share a scale, and the smallest parameter that is quantized.
_QUANTIZED_BLOCK = 256
_QUANTIZED_SMALLEST = 4096


@dataclass(frozen=True, slots=True)
class _Size:
    """Parameters of a layer: all, those of its routed experts, those used in matmuls, experts excluded, and those that
    are not trained; and by the bytes of a value those whose dtype is not the model's.
    """

    total: int
    routed: int
    matmul: int
    untrained: int
    fixed: tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def _layer_size(layer: LayerSpec, width: int, family: str) -> _Size:
    shapes = _shapes(layer, width, family)
    return _Size(
        total=sum(map(prod, shapes.values())),
        routed=sum(prod(shape) for name, shape in shapes.items() if name in _EXPERTS),
        # A convolution's weight has three axes; norms, biases and sinks have one.
        matmul=sum(
            prod(shape)
            for name, shape in shapes.items()
            if (len(shape) == 2 or name.startswith(_SHARED))
            and name not in _EXPERTS
            and name not in _TABLES
            and not name.endswith(_ADDED)
        ),
        untrained=sum(prod(shape) for name, shape in shapes.items() if is_untrained_param(name)),
        fixed=tuple((prod(shape), _FIXED_BYTES[name]) for name, shape in shapes.items() if name in _FIXED_BYTES),
    )


def _shapes(layer: LayerSpec, width: int, family: str) -> dict[str, tuple[int, ...]]:
    """Return a layer's parameter shapes by name suffix."""
    params = build_layer_map(layer, width, ModuleNames("", "", {**HF_NAMES, **find_family(family).names}))
    return {name: tuple(param_shape(slices)) for name, slices in params.items()}


def _active_fraction(layer: LayerSpec) -> float:
    """Return the fraction of a layer's experts that one token uses."""
    return layer.ffn.experts_per_token / layer.ffn.num_experts if isinstance(layer.ffn, MoeSpec) else 0.0


def _vocabulary(spec: DecoderSpec) -> int:
    return spec.vocab_rows * spec.hidden_size


@lru_cache(maxsize=64)
def _vision_shapes(spec: VisionSpec, width: int, family: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a vision tower's parameters by name."""
    params = map_vision(spec, width, {**HF_NAMES, **find_family(family).names})
    return {name: tuple(param_shape(slices)) for name, slices in params.items()}


def vision_parameter_count(spec: DecoderSpec) -> int:
    """Count the parameters of the vision tower and what projects its features; 0 without one."""
    if spec.vision is None or isinstance(spec, HfAdapterSpec):  # of the latter, all parameters are counted together
        return 0
    return sum(map(prod, _vision_shapes(spec.vision, spec.hidden_size, spec.family).values()))


def parameter_count(spec: DecoderSpec) -> int:
    """Count all parameters, of a vision tower too; tied embeddings once."""
    if isinstance(spec, HfAdapterSpec):
        return spec.parameters
    layers = sum(_layer_size(layer, spec.hidden_size, spec.family).total for layer in spec.layers)
    norms = spec.hidden_size * (int(spec.has_final_norm) + int(spec.embedding_norm))
    text = layers + norms + _vocabulary(spec) * (1 if spec.tie_embeddings else 2)
    return text + sum(map(prod, _per_layer_shapes(spec).values())) + vision_parameter_count(spec)


def _per_layer_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what computes the inputs of layers with one of their own, and their streams, by name."""
    if spec.per_layer_input is None and spec.hyper is None:  # so are all models that transformers runs
        return {}
    names = {**HF_NAMES, **find_family(spec.family).names}
    params = map_per_layer_input(spec, names) | map_altup_streams(spec, names) | map_hyper_head(spec, names)
    return {name: tuple(param_shape(slices)) for name, slices in params.items()}


def active_parameter_count(spec: DecoderSpec) -> int:
    """Count the parameters used per token of text: of the routed experts only the selected ones, no n-gram tables."""
    if isinstance(spec, HfAdapterSpec):
        return spec.active
    idle = (
        _layer_size(layer, spec.hidden_size, spec.family).routed * (1 - _active_fraction(layer))
        for layer in spec.layers
    )
    return parameter_count(spec) - vision_parameter_count(spec) - ngram_table_size(spec) - round(sum(idle))


def ngram_table_size(spec: DecoderSpec) -> int:
    """Count the values in tables of n-gram embeddings, of which a token reads few rows."""
    tables = (layer.ngram for layer in spec.layers if layer.ngram is not None)
    return sum(ngram.rows * ngram.dim // len(ngram.head_sizes) for ngram in tables)


def trained_parameter_count(spec: DecoderSpec) -> int:
    """Count the parameters that have a gradient: not correction biases of routers, indexers and fixed scales."""
    if isinstance(spec, HfAdapterSpec):
        return spec.parameters
    untrained = sum(_layer_size(layer, spec.hidden_size, spec.family).untrained for layer in spec.layers)
    if spec.vision is not None:
        shapes = _vision_shapes(spec.vision, spec.hidden_size, spec.family)
        untrained += sum(prod(shape) for name, shape in shapes.items() if is_untrained_param(name))
    return parameter_count(spec) - untrained


def weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Compute the size of the weights in memory or on disk."""
    size = BYTES[dtype]
    layers = () if isinstance(spec, HfAdapterSpec) else spec.layers
    fixed = (pair for layer in layers for pair in _layer_size(layer, spec.hidden_size, spec.family).fixed)
    return parameter_count(spec) * size + sum(count * (each - size) for count, each in fixed)


def packed_weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Compute the size of the weights in memory as a decoder of ``spec`` holds them, packed where it quantizes them."""
    quantization = spec.quantization
    if quantization is None or not quantization.packed or isinstance(spec, HfAdapterSpec):
        return weight_bytes(spec, dtype)
    saved = (
        _packed_saving(layer, spec.hidden_size, spec.family, replace(quantization, layers_at_start=0), BYTES[dtype])
        for i, layer in enumerate(spec.layers)
        if quantizes_layer(quantization, i, spec.num_layers)
    )
    return weight_bytes(spec, dtype) - sum(saved)


@lru_cache(maxsize=256)
def _packed_saving(layer: LayerSpec, width: int, family: str, quantization: QuantizationSpec, size: int) -> int:
    """Compute the bytes that packing saves in one layer."""
    names = ModuleNames("layers.0", "", {**HF_NAMES, **find_family(family).names})
    format, saved = quantization.format, 0
    for name, slices in build_layer_map(layer, width, names).items():
        if find_quantized_layer(name, experts_only=quantization.experts_only) is None:
            continue
        *stack, rows, columns = param_shape(slices)
        packed = format.stored_bytes(rows, columns, fused_segments(slices), quantization.tensor_parallel_size)
        saved += prod(stack) * (rows * columns * size - packed)
    return saved


def gradient_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Compute the size of the gradients, accumulated in float32 whatever the weights are."""
    return trained_parameter_count(spec) * max(4, BYTES[dtype])


def optimizer_bytes(spec: DecoderSpec, dtype: str) -> int:
    """Compute the size of Adam's state: two float32 moments, and float32 master weights for low-precision weights."""
    return trained_parameter_count(spec) * (_MOMENT_BYTES + (_MASTER_BYTES if BYTES[dtype] < 4 else 0))


# -- sharded over ranks ---------------------------------------------------------------------


class StagePart(NamedTuple):
    """The ``layers`` of a pipeline stage, which may be the ``first`` one, and the ``last`` one, which has the head."""

    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingDegrees:
    """Over how many ranks parameters are sharded.

    Heads, channels and the vocabulary are sharded over ``tensor`` ranks; rows of the rest over ``pieces`` ranks, among
    which ``expert`` ranks share the experts. Channels of experts are sharded over ``expert_tensor`` ranks (as many as
    other channels where None); the tensor ranks beyond these hold other experts. There are ``copies`` replicas.
    """

    tensor: int = 1
    expert: int = 1
    pieces: int = 1
    copies: int = 1
    expert_tensor: int | None = None

    @property
    def expert_pieces(self) -> int:
        """Over how many ranks the rows of one expert are sharded."""
        return self.pieces * (self.tensor // (self.expert_tensor or self.tensor)) // self.expert

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP shards parameters and all-gathers them layer by layer; the shards are then float32."""
        return self.pieces * self.copies > 1


@dataclass(frozen=True, slots=True)
class RankParam:
    """Values of one parameter on the rank that holds the most, and its size when all-gathered.

    ``size`` are the bytes of a value where they do not follow from the model's dtype.
    """

    name: str
    count: int
    gathered: int
    axes: int
    trained: bool = True
    size: int | None = None


def list_rank_params(spec: DecoderSpec, degrees: ShardingDegrees) -> tuple[RankParam, ...]:
    """List every parameter as one rank holds it; tied embeddings once."""
    if isinstance(spec, HfAdapterSpec):
        return (RankParam("", -(-spec.parameters // degrees.pieces), spec.parameters, 2),)
    small = shard_spec(spec, degrees.tensor)
    vocabulary = (small.vocab_rows, small.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": vocabulary, **_per_layer_shapes(small)}
    if small.has_final_norm:
        shapes["norm.weight"] = (small.hidden_size,)
    if small.embedding_norm:
        shapes["embedding_norm.weight"] = (small.hidden_size,)
    if not small.tie_embeddings:
        shapes["lm_head.weight"] = vocabulary
    if small.vision is not None:
        shapes |= _vision_shapes(small.vision, small.hidden_size, small.family)
    outer = tuple(_rank_param(name, shape, degrees) for name, shape in shapes.items())
    experts = small if degrees.expert_tensor is None else shard_spec(spec, degrees.expert_tensor)
    return outer + tuple(
        replace(param, name=f"layers.{i}{param.name}")
        for i, (layer, expert_layer) in enumerate(zip(small.layers, experts.layers, strict=True))
        for param in _layer_rank_params(layer, expert_layer, small.hidden_size, small.family, degrees)
    )


@lru_cache(maxsize=256)
def _layer_rank_params(
    layer: LayerSpec, expert_layer: LayerSpec, width: int, family: str, degrees: ShardingDegrees
) -> tuple[RankParam, ...]:
    experts = {name: shape for name, shape in _shapes(expert_layer, width, family).items() if name in _EXPERTS}
    shapes = _shapes(layer, width, family) | experts
    return tuple(_rank_param(name, shape, degrees) for name, shape in shapes.items())


def _rank_param(name: str, shape: tuple[int, ...], degrees: ShardingDegrees) -> RankParam:
    world, dim = degrees.pieces, 0
    if name in _EXPERTS and (degrees.expert > 1 or degrees.expert_tensor is not None):
        shape, world = (-(-shape[0] // degrees.expert), *shape[1:]), degrees.expert_pieces
        # Whole experts, or their rows if those divide evenly and experts do not.
        dim = 1 if shape[0] % world and shape[1] % world == 0 else 0
    gathered, trained = prod(shape), not is_untrained_param(name)
    if name in _FIXED_BYTES:
        return RankParam(name, gathered, gathered, len(shape), trained, _FIXED_BYTES[name])
    return RankParam(name, gathered // shape[dim] * -(-shape[dim] // world), gathered, len(shape), trained)


def rank_bytes(spec: DecoderSpec, degrees: ShardingDegrees, dtype: str, *, trained: bool = True) -> int:
    """Compute the parameters of a rank: float32 if FSDP shards them and they are trained, else ``dtype``."""
    size = 4 if degrees.is_sharded and trained else BYTES[dtype]
    return sum(param.count * (param.size or size) for param in list_rank_params(spec, degrees))


def rank_gradient_bytes(
    spec: DecoderSpec, degrees: ShardingDegrees, frozen_vision: FrozenVision = TRAINED_VISION
) -> int:
    """Compute the float32 gradients of a rank."""
    return 4 * sum(param.count for param in _list_trained(spec, degrees, frozen_vision))


def list_layer_gradient_bytes(spec: DecoderSpec, degrees: ShardingDegrees) -> tuple[int, ...]:
    """Compute the float32 gradients of each layer on a rank."""
    found = [0] * spec.num_layers
    for param in _list_trained(spec, degrees, TRAINED_VISION):
        root, _, rest = param.name.partition(".")
        if root == "layers":
            found[int(rest.partition(".")[0])] += 4 * param.count
    return tuple(found)


def _list_trained(spec: DecoderSpec, degrees: ShardingDegrees, frozen_vision: FrozenVision) -> list[RankParam]:
    params = list_rank_params(spec, degrees)
    frozen = frozen_vision.select(param.name for param in params)
    return [param for param in params if param.trained and param.name not in frozen]


def rank_optimizer_bytes(
    spec: DecoderSpec,
    degrees: ShardingDegrees,
    dtype: str,
    *,
    moments: str = "float32",
    optimizer: str = "adam",
    frozen_vision: FrozenVision = TRAINED_VISION,
) -> int:
    """Compute two moments per value of a rank, or one for the matrices that Muon updates; and master weights.

    Parameters that are float32 need no master weights.
    """
    total = 0
    for param in _list_trained(spec, degrees, frozen_vision):
        total += optimizer_state_bytes(param, moments=moments, optimizer=optimizer)
        total += 0 if degrees.is_sharded or BYTES[dtype] >= 4 else _MASTER_BYTES * param.count
    return total


def optimizer_state_bytes(param: RankParam, *, moments: str, optimizer: str) -> int:
    """Compute the moments of one parameter, without master weights."""
    is_muon = optimizer == "muon" and is_muon_param(param.name, param.axes)
    return (1 if is_muon else 2) * moment_bytes(param.count, moments)


def moment_bytes(count: int, form: str) -> int:
    if form == "int8":
        return 4 * count if count < _QUANTIZED_SMALLEST else count + 4 * -(-count // _QUANTIZED_BLOCK)
    return (4 if form == "float32" else 2) * count


def unsharded_bytes(spec: DecoderSpec, degrees: ShardingDegrees, dtype: str) -> int:
    """Compute the temporary memory of all-gathered parameters: this layer's, the next one's, and gradients being
    reduced. The vision tower is gathered like a layer.

    Embedding, final norm and head stay gathered for the whole step. A layer exists three times (as received, as used,
    and the next layer), its gradients in the model's precision and once more in float32.
    """
    if not degrees.is_sharded:
        return 0
    size, params = BYTES[dtype], list_rank_params(spec, degrees)
    layers: dict[str, int] = {}
    outer = 0
    for param in params:
        if param.name.startswith(("layers.", "vision.")):
            layer = param.name.split(".", 2)[1] if param.name.startswith("layers.") else "vision"
            layers[layer] = layers.get(layer, 0) + param.gathered
        else:
            outer += param.gathered
    return outer * (2 * size + 4) + max(layers.values(), default=0) * (4 * size + 4)


# -- KV cache and FLOPs ---------------------------------------------------------------------


def kv_bytes_per_token(spec: DecoderSpec, dtype: str, numerics: Numerics) -> int:
    """Compute the KV-cache bytes of one token in all layers."""
    layouts = (cache_layout(layer.mixer, numerics) for layer in spec.layers)
    size = BYTES[dtype]
    return sum(layout.bytes_per_token(size, numerics) for layout in layouts if isinstance(layout, PerTokenCache))


def state_bytes_per_sequence(spec: DecoderSpec, dtype: str) -> int:
    """Compute the recurrent-state bytes of one sequence, whatever its length."""
    return sum(
        prod(shape) * (4 if wide else BYTES[dtype])
        for layout in list_states(spec, FAST).values()  # a state is the same in all numerics
        for shape, wide in zip(layout.shapes, layout.wide, strict=True)
    )


def forward_flops_per_token(spec: DecoderSpec, context: float = 0.0) -> float:
    """Compute the FLOPs of one token (a multiply-add is two), logits included.

    ``context`` is the average number of earlier tokens. A training step costs three times as much.
    """
    outer = (
        prod(shape)
        for name, shape in _per_layer_shapes(spec).items()
        if "projection" in name or (name.startswith("hyper_head.") and len(shape) == 2)
    )
    matmul = float(_vocabulary(spec) + sum(outer))
    attention = 0.0
    if isinstance(spec, HfAdapterSpec):  # nearly everything except the embedding is a matmul weight
        matmul = float(spec.active - (0 if spec.tie_embeddings else _vocabulary(spec)))
    for layer in spec.layers:
        attention += _mixer_flops(layer.mixer, context)
        if isinstance(layer.hyper, HyperConnectionSpec):  # streams are mixed twice
            attention += 4.0 * layer.hyper.streams**2 * spec.hidden_size
        if layer.ngram is not None:
            attention += 2.0 * layer.ngram.kernel * spec.streams * spec.hidden_size
        attention += 0.0 if layer.altup is None else _altup_flops(layer.altup.streams, spec.hidden_size)
        if not isinstance(spec, HfAdapterSpec):
            size = _layer_size(layer, spec.hidden_size, spec.family)
            matmul += size.matmul + size.routed * _active_fraction(layer)
    return 2.0 * matmul + attention


def _altup_flops(streams: int, width: int) -> float:
    """Compute the FLOPs that mix a token's residual streams, and those of the second use of the layer's router."""
    return 2.0 * streams * streams * width + 2.0 * streams * width


def _mixer_flops(mixer: Mixer | None, context: float) -> float:
    """Compute the FLOPs of a token attending to earlier tokens."""
    match mixer:
        case AttentionSpec():
            return _attention_flops(mixer, context)
        case RelativeAttentionSpec():  # the bias of every distance is computed, of which some are used
            visible = min(context, mixer.window or context)
            return mixer.num_heads * (4.0 * visible * mixer.head_dim + 2.0 * mixer.rank * mixer.extent)
        case MlaSpec():
            index = mixer.indexer
            visible = context if index is None else min(context, index.top + index.pool - 1)
            scored = 0.0
            if index is not None and index.source is None:
                scored = 2.0 * context / index.pool * index.num_heads * index.head_dim
            return 2.0 * visible * mixer.num_heads * (mixer.head_dim + mixer.value_dim) + scored
        case CompressedAttentionSpec():
            return _compressed_attention_flops(mixer, context)
        case None:
            return 0.0
        case _:
            return _recurrent_flops(mixer)


def _recurrent_flops(mixer: RecurrentMixer) -> float:
    """Compute the FLOPs that update and read a token's recurrent state."""
    match mixer:
        case GatedDeltaNetSpec():
            within = 4.0 * mixer.key_heads * mixer.key_dim + 2.0 * mixer.value_heads * mixer.value_dim
            return 6.0 * mixer.value_heads * mixer.key_dim * mixer.value_dim + within * CHUNK
        case KimiDeltaSpec():
            inner = mixer.num_heads * mixer.head_dim
            # Scores are computed twice, without most of the sub-blocks above the diagonal, and read once.
            return 6.0 * inner * mixer.head_dim + 4.5 * inner * CHUNK
        case MambaSpec():
            within = 2.0 * (mixer.groups * mixer.state_dim + mixer.num_heads * mixer.head_dim)
            return 4.0 * mixer.num_heads * mixer.head_dim * mixer.state_dim + within * CHUNK
        case ShortConvSpec():
            return 0.0


def _attention_flops(mixer: AttentionSpec, context: float) -> float:
    """Compute the FLOPs of a token attending to earlier ones, or to those that an indexer selects."""
    visible = min(context, mixer.window or context, mixer.chunk or context)
    scored = 0.0
    if isinstance(index := mixer.indexer, PoolIndexerSpec):
        visible = min(visible, index.top + index.pool - 1)
        scored = 2.0 * context / index.pool * index.num_heads * index.head_dim
    elif index is not None:
        visible = min(visible, index.top * index.block)
        scored = 2.0 * context * mixer.num_kv_heads * index.head_dim
    return 4.0 * visible * mixer.num_heads * mixer.head_dim + scored


def _compressed_attention_flops(mixer: CompressedAttentionSpec, context: float) -> float:
    """Compute the FLOPs of a token attending to a window, and to compressed keys of all earlier tokens."""
    visible = min(context, mixer.window)
    scored = 0.0
    if (compressor := mixer.compressor) is not None:
        windows, index = context / compressor.rate, compressor.indexer
        visible += windows if index is None else min(windows, index.top)
        scored = 0.0 if index is None else 2.0 * windows * index.num_heads * index.head_dim
    return 4.0 * visible * mixer.num_heads * mixer.head_dim + scored
