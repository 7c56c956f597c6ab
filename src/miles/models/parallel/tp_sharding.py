"""Tensor-parallel sharding: the spec of each rank's decoder, and which part of each tensor it holds. No torch.

A rank has some of the heads, some inner channels of every MLP and expert, and some rows of the vocabulary, so its
tensors form an ordinary decoder of a smaller spec. The output of a mixer or feed-forward part on one rank is a partial
sum; summed over the ranks it is the full decoder's. Norms, routers, MLA latents and the vision tower are replicated on
every rank. Sizes that do not divide evenly are padded with zero rows, which add nothing; heads are never padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from miles.core.errors import UsageError
from miles.models.checkpoint.param_map import build_param_map
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.layout import LORA_A, LORA_B, LoraLayout, factor_name, plan_adapters
from miles.models.lora.targets import LM_HEAD_PARAM
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.residual_spec import GatedResidualSpec, NgramSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    FeedForward,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    PoolIndexerSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
)

__all__ = [
    "ReplicatedRows",
    "ShardSegment",
    "TpShard",
    "check_tp_size",
    "compute_tp_shards",
    "gather_param",
    "shard_param",
    "shard_spec",
]


@dataclass(frozen=True, slots=True)
class ShardSegment:
    """``units`` of ``rows`` rows each, distributed over the ranks in order.

    If there are more ranks than units, units with ``repeat`` are replicated on neighbouring ranks; others are on the
    first ranks only.
    """

    units: int
    rows: int = 1
    repeat: bool = False

    def units_per_rank(self, world: int) -> int:
        """Units per rank, padding included."""
        return -(-self.units // world)

    def bounds(self, rank: int, world: int) -> tuple[int, int]:
        """Return the row range of a rank; shorter than its padded size where the rest is padding."""
        if self.repeat and world > self.units:
            first = rank * self.units // world
            return first * self.rows, (first + 1) * self.rows
        first = min(rank * self.units_per_rank(world), self.units)
        return first * self.rows, min(first + self.units_per_rank(world), self.units) * self.rows


@dataclass(frozen=True, slots=True)
class ReplicatedRows:
    """Rows ``start`` to ``start + rows`` of a rank, which are one of ``units`` that neighbouring ranks share.

    ``first`` says that no earlier rank has them.
    """

    start: int
    rows: int
    unit: int
    units: int
    first: bool


@dataclass(frozen=True, slots=True)
class TpShard:
    """How one tensor is sharded: dimension ``dim`` consists of ``segments``, and each rank has a part of each.

    Without segments the tensor is replicated; with ``first_rank_only`` the first rank has it and the others have zeros,
    for biases that must be added once. A replicated tensor inside a mixer or feed-forward part has ``partial_grad``:
    its gradient is the sum over the ranks. ``stacked`` tensors have one expert per row of dimension 0.
    """

    dim: int = 0
    segments: tuple[ShardSegment, ...] = ()
    first_rank_only: bool = False
    partial_grad: bool = False
    stacked: bool = False

    def shard(self, tensor: Any, rank: int, world: int) -> Any:
        """Return the part of ``tensor`` that ``rank`` holds: contiguous, and a copy unless it is the full tensor."""
        if self.first_rank_only and rank:
            return tensor.new_zeros(tensor.shape)
        if not self.segments or world == 1:
            return tensor
        size = sum(segment.units_per_rank(world) * segment.rows for segment in self.segments)
        out = tensor.new_zeros((*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :]))
        for full_start, rank_start, count in self.runs(rank, world):
            out.narrow(self.dim, rank_start, count).copy_(tensor.narrow(self.dim, full_start, count))
        return out

    def gather(self, tensors: Sequence[Any]) -> Any:
        """Return the full tensor from the ranks' parts, in order."""
        first = tensors[0]
        if not self.segments or len(tensors) == 1:
            return first
        size = sum(segment.units * segment.rows for segment in self.segments)
        full = first.new_empty((*first.shape[: self.dim], size, *first.shape[self.dim + 1 :]))
        for rank, tensor in enumerate(tensors):
            for full_start, rank_start, count in self.runs(rank, len(tensors)):
                full.narrow(self.dim, full_start, count).copy_(tensor.narrow(self.dim, rank_start, count))
        return full

    def replicated_rows(self, rank: int, world: int) -> list[ReplicatedRows]:
        """Return the runs of rows along ``dim`` that other ranks hold too."""
        out: list[ReplicatedRows] = []
        here = 0
        for segment in self.segments:
            rows = segment.units_per_rank(world) * segment.rows
            if segment.repeat and world > segment.units:
                unit = rank * segment.units // world
                first = rank == 0 or (rank - 1) * segment.units // world < unit
                out.append(ReplicatedRows(start=here, rows=rows, unit=unit, units=segment.units, first=first))
            here += rows
        return out

    def runs(self, rank: int, world: int) -> Iterable[tuple[int, int, int]]:
        """Yield where a run of rows starts in the full tensor and on the rank, and its length."""
        there = here = 0
        for segment in self.segments:
            start, stop = segment.bounds(rank, world)
            if stop > start:
                yield there + start, here, stop - start
            there, here = there + segment.units * segment.rows, here + segment.units_per_rank(world) * segment.rows


_RESIDUAL = TpShard()  # on the residual stream, which is replicated
_REPLICATED = TpShard(partial_grad=True)
_FIRST_RANK = TpShard(first_rank_only=True)

TpShards = dict[str, TpShard]


def shard_param(spec: DecoderSpec, name: str, tensor: Any, rank: int, world: int) -> Any:
    """Return the part of the full decoder's parameter ``name`` that ``rank`` of ``world`` holds."""
    return compute_tp_shards(spec)[name].shard(tensor, rank, world)


def gather_param(spec: DecoderSpec, name: str, tensors: Sequence[Any]) -> Any:
    """Return the full decoder's parameter ``name`` from the ranks' parts: the inverse of ``shard_param``."""
    return compute_tp_shards(spec)[name].gather(tensors)


# -- the spec of a rank ---------------------------------------------------------------------


def shard_spec(spec: DecoderSpec, world: int) -> DecoderSpec:
    """Return the spec of each rank's decoder; UsageError if the model cannot be sharded so. All ranks' are equal."""
    problem = check_tp_size(spec, world)
    if problem is not None:
        raise UsageError(f"the model cannot be sharded over {world} tensor-parallel ranks: {problem}.")
    if world == 1:
        return spec
    layers = tuple(
        replace(
            layer,
            mixer=_shard_mixer(layer.mixer, world),
            ffn=_shard_ffn(layer.ffn, world),
            ngram=_shard_ngram(layer.ngram, world),
        )
        for layer in spec.layers
    )
    rows = ShardSegment(spec.vocab_rows).units_per_rank(world)
    return replace(spec, vocab_size=rows, vocab_padding=0, layers=layers)


def _shard_mixer(mixer: Mixer | None, world: int) -> Mixer | None:
    match mixer:
        case AttentionSpec() | RelativeAttentionSpec():
            kv_heads = ShardSegment(mixer.num_kv_heads).units_per_rank(world)
            return replace(mixer, num_heads=mixer.num_heads // world, num_kv_heads=kv_heads)
        case MlaSpec():
            return replace(mixer, num_heads=mixer.num_heads // world)
        case CompressedAttentionSpec():
            return replace(mixer, num_heads=mixer.num_heads // world, output_groups=mixer.output_groups // world)
        case GatedDeltaNetSpec():
            return replace(mixer, key_heads=mixer.key_heads // world, value_heads=mixer.value_heads // world)
        case KimiDeltaSpec():
            return replace(mixer, num_heads=mixer.num_heads // world)
        case MambaSpec():
            return replace(mixer, num_heads=mixer.num_heads // world, groups=mixer.groups // world)
        case ShortConvSpec():
            return replace(mixer, channels=mixer.channels // world)
        case None:
            return None


def _shard_ffn(ffn: FeedForward | None, world: int) -> FeedForward | None:
    if ffn is None:
        return None
    inner = ShardSegment(ffn.size).units_per_rank(world)
    if isinstance(ffn, MlpSpec):
        return replace(ffn, size=inner)
    shared = (
        None if ffn.shared is None else replace(ffn.shared, size=ShardSegment(ffn.shared.size).units_per_rank(world))
    )
    return replace(ffn, size=inner, shared=shared)


def _shard_ngram(ngram: NgramSpec | None, world: int) -> NgramSpec | None:
    return None if ngram is None else replace(ngram, rows=ShardSegment(ngram.rows).units_per_rank(world), shards=1)


def check_tp_size(spec: DecoderSpec, world: int) -> str | None:
    """Return why ``world`` ranks cannot share this model (the end of a sentence), or None if they can."""
    if world == 1:
        return None
    if isinstance(spec, HfAdapterSpec):
        return f"{spec.architecture} is computed by transformers, which is not sharded"
    problems = ((i, _check_mixer(layer.mixer, world)) for i, layer in enumerate(spec.layers))
    return next((f"layer {i} has {problem}" for i, problem in problems if problem is not None), None)


def _check_mixer(mixer: Mixer | None, world: int) -> str | None:
    match mixer:
        case AttentionSpec() | RelativeAttentionSpec() | MlaSpec():
            count, unit = mixer.num_heads, "attention heads"
        case CompressedAttentionSpec():
            count, unit = mixer.output_groups, "output groups of attention heads"
        case GatedDeltaNetSpec():
            count, unit = mixer.key_heads, "key heads in its Gated DeltaNet"
        case KimiDeltaSpec():
            count, unit = mixer.num_heads, "heads in its Kimi Delta Attention"
        case MambaSpec():
            count, unit = mixer.groups, "groups in its Mamba-2 mixer"
        case ShortConvSpec():
            count, unit = mixer.channels, "channels in its short convolution"
        case None:
            return None
    if count % world:
        return f"{count} {unit}, which they cannot divide evenly"
    if (
        isinstance(mixer, AttentionSpec | RelativeAttentionSpec)
        and mixer.num_kv_heads % world
        and world % mixer.num_kv_heads
    ):
        return f"{mixer.num_kv_heads} key-value heads, which they can neither divide nor repeat evenly"
    return None


# -- the shards of each parameter -----------------------------------------------------------


@lru_cache(maxsize=8)
def compute_tp_shards(spec: DecoderSpec) -> Mapping[str, TpShard]:
    """Return how each parameter of the full decoder is sharded, for any number of ranks."""
    vocabulary = _row_shard(ShardSegment(spec.vocab_rows))
    table: TpShards = {"embedding.weight": vocabulary}
    if spec.embedding_norm:
        table["embedding_norm.weight"] = _RESIDUAL
    if spec.per_layer_input is not None:
        table |= {name: _RESIDUAL for name in build_param_map(spec) if name.startswith(("per_layer.", "altup."))}
    for i, layer in enumerate(spec.layers):
        table |= {f"layers.{i}.{name}": share for name, share in _layer_shards(layer).items()}
    table |= dict.fromkeys(_list_joins(spec), _RESIDUAL)
    if not spec.tie_embeddings:
        table["lm_head.weight"] = vocabulary
    if spec.vision is not None:
        # Every rank has the vision tower and computes the features, which are part of the residual stream.
        table |= {name: _RESIDUAL for name in build_param_map(spec) if name.startswith("vision.")}
    weights = dict(table)
    for name, quantized in plan_quantization(spec).items():
        if quantized.packed:
            table |= _packed_shards(name, table[name], quantized)
    for name, lora in plan_adapters(spec).items():
        # The output layer may have no weight of its own, but the embedding's.
        weight = vocabulary if name == LM_HEAD_PARAM else weights[name]
        table |= _factor_shards(name, weight, lora)
    return table


def _list_joins(spec: DecoderSpec) -> list[str]:
    """The parameters behind the last layer: what joins residual streams, and the norm."""
    names = ["norm.weight"] if spec.has_final_norm else []
    if isinstance(spec.hyper, GatedResidualSpec):
        return [*names, *(f"hyper_head.{name}" for name in ("norm.weight", "down", "up"))]
    if spec.hyper is not None and spec.hyper.learned_join:
        return [*names, *(f"hyper_head.{name}" for name in ("fn", "base", "scale"))]
    return names


def _packed_shards(name: str, weight: TpShard, quantized: QuantizedParam) -> TpShards:
    """The shards of a packed parameter's tensors; ``find_divided_block`` says where ranks would divide a block of rows
    that share a scale.
    """
    format, world = quantized.format, quantized.tensor_parallel_size
    by_row = not weight.segments or weight.dim == (1 if weight.stacked else 0)
    if by_row:
        data, block = weight, format.row_block(sum(quantized.segments), quantized.segments, world)
        scale = replace(weight, segments=tuple(_count_blocks(segment, block) for segment in weight.segments))
    else:
        if world > 1 and format.quantizes_activations and format.activation_columns is None:
            raise UsageError(
                f"{format.name} has one scale for all inputs of a token, of which {world} tensor-parallel ranks would "
                f"each have a part in {name}; use fp8 or mxfp8, or one rank per engine."
            )
        data = _coarsen(name, weight, 8 // format.bits, world)
        scale = TpShard(stacked=weight.stacked) if format.columns is None else None
        scale = scale or _coarsen(name, weight, format.columns or 1, world)
    shards = {"": data, "_scale": scale, "_zero": scale, "_global_scale": TpShard(stacked=weight.stacked)}
    return {f"{name}{suffix}": shards[suffix] for suffix in quantized.suffixes}


def _factor_shards(name: str, weight: TpShard, lora: LoraLayout) -> TpShards:
    """The shards of a weight's LoRA factors: B is sharded with its outputs, A with its inputs."""
    a, b = factor_name(name, LORA_A), factor_name(name, LORA_B)
    if not weight.segments:
        return {a: _REPLICATED, b: _REPLICATED}
    if weight.dim == (2 if weight.stacked else 1):
        return {a: TpShard(dim=weight.dim, segments=weight.segments), b: _REPLICATED}
    borders = [0, *accumulate(segment.units * segment.rows for segment in weight.segments)]
    own: list[ShardSegment] = []
    for start, stop in lora.rows:
        if start not in borders or stop not in borders:
            raise UsageError(f"the LoRA adapter of a part of {name} cannot be sharded over tensor-parallel ranks.")
        own += weight.segments[borders.index(start) : borders.index(stop)]
    if weight.stacked:  # whose targets are one after the other in dimension 0, and have equal rows
        return {a: _REPLICATED, b: TpShard(dim=1, segments=tuple(own[: len(own) // len(lora.rows)]))}
    return {a: _REPLICATED, b: TpShard(segments=tuple(own))}


def _count_blocks(segment: ShardSegment, block: int) -> ShardSegment:
    """The segment in blocks of rows, of which every rank has whole ones."""
    if segment.rows % block == 0:
        return replace(segment, rows=segment.rows // block)
    return ShardSegment(-(-segment.units * segment.rows // block))


def _coarsen(name: str, weight: TpShard, columns: int, world: int) -> TpShard:
    """The shard of a tensor with one column for each ``columns`` of a weight that is sharded by its inputs."""
    segments: list[ShardSegment] = []
    for segment in weight.segments:
        total = segment.units * segment.rows
        if segment.rows % columns == 0:
            segments.append(replace(segment, rows=segment.rows // columns))
        elif total % (columns * world) == 0 or world == 1:
            segments.append(ShardSegment(-(-total // columns)))
        else:
            raise UsageError(
                f"{name} has {total} input channels, which {world} tensor-parallel ranks cannot share in blocks of "
                f"{columns}; use fewer ranks per engine or another precision."
            )
    return replace(weight, segments=tuple(segments))


def _layer_shards(layer: LayerSpec) -> TpShards:
    out: TpShards = {}
    if layer.mixer is not None:
        out |= {"attention_norm.weight": _RESIDUAL} if layer.has_norms else {}
        out |= _mixer_shards(layer.mixer)
        out |= {"attention_conv.conv": _RESIDUAL} if layer.output_kernel else {}
    if layer.ffn is not None:
        out |= {"mlp_norm.weight": _RESIDUAL} if layer.has_norms else {}
        out |= _ffn_shards(layer.ffn)
        out |= {"mlp_conv.conv": _RESIDUAL} if layer.output_kernel else {}
    if layer.post_norms:
        kinds = {"attention": layer.mixer, "mlp": layer.ffn}
        out |= {f"{kind}_post_norm.weight": _RESIDUAL for kind, there in kinds.items() if there is not None}
    if layer.per_layer_size:
        names = ("gate.weight", "projection.weight", "norm.weight")
        out |= {f"per_layer.{name}": _RESIDUAL for name in names}
    if layer.altup is not None:
        names = ("prediction.weight", "correction.weight", "router.weight", "router_norm.weight", "output_scale")
        out |= {f"altup.{name}": _RESIDUAL for name in names}
        out |= {f"laurel.{name}.weight": _RESIDUAL for name in ("left", "right", "norm")}
    if layer.output_scale:
        out["output_scale"] = _RESIDUAL
    if layer.hyper is not None:
        is_gated = isinstance(layer.hyper, GatedResidualSpec)
        names = ("norm.weight", "down", "up", "inject") if is_gated else ("fn", "base", "scale")
        out |= {f"{part}_hyper.{name}": _RESIDUAL for part in ("attention", "mlp") for name in names}
    if layer.ngram is not None:
        out |= _prefix("ngram", _ngram(layer.ngram))
    return out


def _ngram(spec: NgramSpec) -> TpShards:
    """The table is sharded by its rows; what follows is on the residual stream."""
    names = ["multipliers", "sizes", "offsets", "key.weight", "value.weight", "conv"]
    names += [f"{part}_norm.weight" for part in ("key", "query", "conv")]
    return {"table.weight": _row_shard(ShardSegment(spec.rows)), **dict.fromkeys(names, _RESIDUAL)}


def _mixer_shards(mixer: Mixer) -> TpShards:
    match mixer:
        case AttentionSpec():
            return _prefix("attention", _attention(mixer))
        case RelativeAttentionSpec():
            return _prefix("relative", _relative_attention(mixer))
        case MlaSpec():
            return _prefix("mla", _mla(mixer))
        case CompressedAttentionSpec():
            return _prefix("compressed", _compressed_attention(mixer))
        case GatedDeltaNetSpec():
            return _prefix("delta", _delta(mixer))
        case KimiDeltaSpec():
            return _prefix("kda", _kda(mixer))
        case MambaSpec():
            return _prefix("mamba", _mamba(mixer))
        case ShortConvSpec():
            return _prefix("short_conv", _short_conv(mixer))


def _ffn_shards(ffn: FeedForward) -> TpShards:
    return _prefix("mlp", _mlp(ffn)) if isinstance(ffn, MlpSpec) else _prefix("moe", _moe(ffn))


def _attention(spec: AttentionSpec) -> TpShards:
    queries, keys = (
        ShardSegment(spec.num_heads, spec.head_dim),
        ShardSegment(spec.num_kv_heads, spec.head_dim, repeat=True),
    )
    gated = ShardSegment(spec.num_heads, 2 * spec.head_dim) if spec.gated else queries
    own = (keys,) if spec.value_from_key else (keys, keys)
    own = () if spec.kv_source is not None else own
    out = _column_parallel("qkv", _row_shard(gated, *own), bias=spec.qkv_bias)
    out |= _row_parallel("output", queries, bias=spec.output_bias)
    if spec.qk_norm in ("head", "all", "head_after_rope"):
        each = spec.qk_norm != "all"
        out["q_norm.weight"] = _REPLICATED if each else _row_shard(queries)
        if spec.kv_source is None:
            out["k_norm.weight"] = _REPLICATED if each else _row_shard(keys)
    if spec.head_gate:
        out |= _column_parallel("gate", _row_shard(ShardSegment(spec.num_heads)), bias=False)
    if spec.sinks:
        out["sinks"] = _row_shard(ShardSegment(spec.num_heads))
    if isinstance(spec.indexer, PoolIndexerSpec):  # all ranks select the same tokens
        out |= {f"indexer.{name}.weight": _REPLICATED for name in ("qk", "q_norm", "k_norm")}
    elif spec.indexer is not None:
        out["indexer.q.weight"] = _row_shard(ShardSegment(spec.num_kv_heads, spec.indexer.head_dim, repeat=True))
        out |= {f"indexer.{name}.weight": _REPLICATED for name in ("k", "q_norm", "k_norm")}
    return out


def _relative_attention(spec: RelativeAttentionSpec) -> TpShards:
    """Heads are sharded; all ranks have the profiles of the position bias."""
    queries = ShardSegment(spec.num_heads, spec.head_dim)
    keys = ShardSegment(spec.num_kv_heads, spec.head_dim, repeat=True)
    out = _column_parallel("qkv", _row_shard(queries, keys, keys), bias=False)
    out |= _column_parallel("relative", _row_shard(ShardSegment(spec.num_heads, spec.rank)), bias=False)
    out |= {"kv_conv.conv": _row_shard(keys, keys)}
    out |= dict.fromkeys(("q_norm.weight", "k_norm.weight", "profiles"), _REPLICATED)
    return out | _row_parallel("output", queries, bias=False)


def _mla(spec: MlaSpec) -> TpShards:
    queries = _row_shard(ShardSegment(spec.num_heads, spec.head_dim))
    if spec.query_rank is None:
        out = _column_parallel("q", queries, bias=False)
    else:
        out = _column_parallel("q_a", _REPLICATED, bias=spec.bias) | _column_parallel("q_b", queries, bias=False)
        out["q_a_norm.weight"] = _REPLICATED
    out |= _column_parallel("kv_a", _REPLICATED, bias=spec.bias)
    out["kv_a_norm.weight"] = _REPLICATED
    out |= _column_parallel(
        "kv_b", _row_shard(ShardSegment(spec.num_heads, spec.nope_dim + spec.value_dim)), bias=False
    )
    if spec.indexer is not None and spec.indexer.source is None:
        names = ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"]
        names += ["pool_gate.weight", "pool_bias"] if spec.indexer.pool > 1 else []
        out |= {f"indexer.{name}": _REPLICATED for name in names}
    return out | _row_parallel("output", ShardSegment(spec.num_heads, spec.value_dim), bias=spec.bias)


def _compressed_attention(spec: CompressedAttentionSpec) -> TpShards:
    """Heads are sharded by the groups of their outputs; all ranks have the keys, the compressor and the indexer."""
    names = ["q_a.weight", "q_a_norm.weight", "kv.weight", "kv_norm.weight"]
    own = ("kv_gate.weight", "position_bias", "norm.weight")
    if spec.compressor is not None:
        names += [f"compressor.{name}" for name in own]
        if spec.compressor.indexer is not None:
            names += ["indexer.wq_b.weight", "indexer.weights_proj.weight"]
            names += [f"indexer.compressor.{name}" for name in own]
    groups = ShardSegment(spec.output_groups, spec.output_rank)
    out: TpShards = dict.fromkeys(names, _REPLICATED)
    out |= {
        "q_b.weight": _row_shard(ShardSegment(spec.num_heads, spec.head_dim)),
        "sinks": _row_shard(ShardSegment(spec.num_heads)),
        "output_groups.weight": _row_shard(groups),
    }
    return out | _row_parallel("output", groups, bias=False)


def _delta(spec: GatedDeltaNetSpec) -> TpShards:
    keys, values = ShardSegment(spec.key_heads, spec.key_dim), ShardSegment(spec.value_heads, spec.value_dim)
    heads = ShardSegment(spec.value_heads)
    out: TpShards = {}
    if spec.fused:
        share = spec.value_heads // spec.key_heads
        out["qkvz.weight"] = _row_shard(ShardSegment(spec.key_heads, 2 * (spec.key_dim + share * spec.value_dim)))
        out["ba.weight"] = _row_shard(ShardSegment(spec.key_heads, 2 * share))
    else:
        out["qkvz.weight"] = _row_shard(keys, keys, values, values)
        out["ba.weight"] = _row_shard(heads, heads)
    out |= {
        "conv": _row_shard(keys, keys, values),
        "dt_bias": _row_shard(heads),
        "A_log": _row_shard(heads),
        "norm.weight": _REPLICATED,
    }
    return out | _row_parallel("output", values, bias=False)


def _kda(spec: KimiDeltaSpec) -> TpShards:
    channels, heads = ShardSegment(spec.num_heads, spec.head_dim), ShardSegment(spec.num_heads)
    out: TpShards = {f"{name}.weight": _REPLICATED for name in ("f_a", "g_a", "norm")}
    out |= {f"{name}.weight": _row_shard(channels) for name in ("f_b", "g_b")}
    out |= {
        "qkv.weight": _row_shard(channels, channels, channels),
        "conv": _row_shard(channels, channels, channels),
        "b.weight": _row_shard(heads),
        "dt_bias": _row_shard(channels),
        "A_log": TpShard(dim=0 if spec.flat_rates else 2, segments=(heads,)),
    }
    return out | _row_parallel("output", channels, bias=False)


def _mamba(spec: MambaSpec) -> TpShards:
    inner, both, heads = (
        ShardSegment(spec.num_heads, spec.head_dim),
        ShardSegment(spec.groups, spec.state_dim),
        ShardSegment(spec.num_heads),
    )
    out = _column_parallel("input", _row_shard(inner, inner, both, both, heads), bias=spec.bias)
    out["conv"] = _row_shard(inner, both, both)
    if spec.conv_bias:
        out["conv_bias"] = _row_shard(inner, both, both)
    out |= {name: _row_shard(heads) for name in ("dt_bias", "A_log", "skip")}
    out["norm.weight"] = _row_shard(inner)
    return out | _row_parallel("output", inner, bias=spec.bias)


def _short_conv(spec: ShortConvSpec) -> TpShards:
    channels = ShardSegment(spec.channels)
    out = _column_parallel("input", _row_shard(channels, channels, channels), bias=spec.bias)
    out["conv"] = _row_shard(channels)
    if spec.bias:
        out["conv_bias"] = _row_shard(channels)
    return out | _row_parallel("output", channels, bias=spec.bias)


def _mlp(spec: MlpSpec) -> TpShards:
    inner = ShardSegment(spec.size)
    if spec.gated:
        parts = (ShardSegment(spec.size, 2),) if spec.interleaved else (inner, inner)
        out = _column_parallel("gate_up", _row_shard(*parts), bias=spec.bias)
    else:
        out = _column_parallel("up", _row_shard(inner), bias=spec.bias)
    out |= {"scale": _REPLICATED} if spec.learned_scale else {}
    return out | _row_parallel("down", inner, bias=spec.bias)


def _moe(spec: MoeSpec) -> TpShards:
    """Each expert is on all ranks with some of its channels, so no token is sent to another rank."""
    inner = ShardSegment(spec.size)
    out: TpShards = {"correction": _REPLICATED} if spec.correction else {}
    out |= {"expert_table": _REPLICATED} if spec.hash_vocab else {}
    out |= _column_parallel("router", _REPLICATED, bias=spec.router_bias)
    if spec.gated:
        parts = (ShardSegment(spec.size, 2),) if spec.interleaved else (inner, inner)
        first = out["gate_up"] = TpShard(dim=1, segments=parts, stacked=True)
    else:
        first = out["up"] = TpShard(dim=1, segments=(inner,), stacked=True)
    out["down"] = TpShard(dim=2, segments=(inner,), stacked=True)
    if spec.weighed_shared:
        out["shared_experts.factor"] = _REPLICATED
        out["shared_experts.gate_up"] = TpShard(dim=1, segments=first.segments)
        out["shared_experts.down"] = TpShard(dim=2, segments=(inner,))
    if spec.expert_bias:
        out |= {"gate_up_bias": first, "down_bias": TpShard(first_rank_only=True, stacked=True)}
    if spec.latent is not None:
        out |= _column_parallel("into", _REPLICATED, bias=spec.latent_bias)
        out["outof.weight"] = _REPLICATED
        if spec.latent_bias:
            out["outof.bias"] = _FIRST_RANK
    if spec.shared is not None:
        out |= _prefix("shared", _mlp(spec.shared))
        if spec.shared_gate:
            out["shared_gate.weight"] = _REPLICATED
    if spec.beside_mlp:
        out |= dict.fromkeys(("router_scale", "expert_scale", "expert_norm.weight"), _REPLICATED)
        out |= dict.fromkeys(("expert_post_norm.weight", "shared_post_norm.weight"), _RESIDUAL)
    return out


def _row_shard(*parts: ShardSegment) -> TpShard:
    return TpShard(segments=parts)


def _column_parallel(name: str, rows: TpShard, *, bias: bool) -> TpShards:
    """A column-parallel projection: its outputs are sharded."""
    return {f"{name}.weight": rows} | ({f"{name}.bias": rows} if bias else {})


def _row_parallel(name: str, inputs: ShardSegment, *, bias: bool) -> TpShards:
    """A row-parallel projection: its inputs are sharded, its output is a partial sum, and its bias is added once."""
    return {f"{name}.weight": TpShard(dim=1, segments=(inputs,))} | ({f"{name}.bias": _FIRST_RANK} if bias else {})


def _prefix(module: str, inner: TpShards) -> TpShards:
    return {f"{module}.{name}": share for name, share in inner.items()}
