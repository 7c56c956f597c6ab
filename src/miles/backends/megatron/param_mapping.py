"""Mapping of decoder parameters to Megatron's: names, layout, and tensor-parallel sharding.

Megatron interleaves queries, keys and values by group of heads, has one module per expert, and shards evenly over its
tensor-parallel ranks. A rank's part follows from the spec alone, so weights move between any two layouts, and in and
out of Hugging Face checkpoints, without an intermediate format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from miles.backends.megatron.module_choice import MIXER_NAMES, AdaptedPart, choose_modules
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.parallel.tp_sharding import ShardSegment, TpShard, compute_tp_shards
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.spec import AttentionSpec, DecoderSpec, MoeSpec
from miles.precision.quantize import packed_layout

# Decoder name -> Megatron's name in a layer; the second name is used if Transformer Engine fuses a norm into the
# following projection. ``{}`` counts a rank's experts.
_LAYER: Mapping[str, tuple[str, ...]] = {
    "attention_norm.weight": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "attention.qkv": ("self_attention.linear_qkv",),
    "attention.output": ("self_attention.linear_proj",),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "mla.q": ("self_attention.linear_q_proj",),
    "mla.q_a": ("self_attention.linear_q_down_proj",),
    "mla.q_a_norm.weight": ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    "mla.q_b": ("self_attention.linear_q_up_proj",),
    "mla.kv_a": ("self_attention.linear_kv_down_proj",),
    "mla.kv_a_norm.weight": (
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    "mla.kv_b": ("self_attention.linear_kv_up_proj",),
    "mla.output": ("self_attention.linear_proj",),
    "attention_post_norm.weight": ("self_attn_bda.norm.weight",),
    "mlp_norm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "mlp_post_norm.weight": ("mlp_bda.norm.weight",),
    "output_scale": ("output_scale",),
    "mlp.gate_up": ("mlp.linear_fc1",),
    "mlp.down": ("mlp.linear_fc2",),
    "moe.router": ("mlp.router",),
    "moe.correction": ("mlp.router.expert_bias",),
    "moe.gate_up": ("mlp.experts.local_experts.{}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{}"),
    "moe.down": ("mlp.experts.local_experts.{}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{}"),
    "moe.shared.gate_up": ("mlp.shared_experts.linear_fc1",),
    "moe.shared.down": ("mlp.shared_experts.linear_fc2",),
    "moe.shared_gate.weight": ("mlp.shared_experts.gate_weight",),
}
_TOP: Mapping[str, str] = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
LM_HEAD = "lm_head.weight"
TIED = "embedding.weight"
"""The parameter of which the last stage has a copy if the head is tied."""

_RESIDUAL = ("altup.", "hyper_head.", "per_layer.")
_STREAMS = ("altup.", "laurel.", "attention_hyper.", "mlp_hyper.", "ngram.")
_EXPERTS = ("moe.gate_up", "moe.down")
# MLA down-projections: sharded over tensor-parallel ranks, except with Transformer Engine and batch-invariant layers.
_LATENT = ("mla.q_a.weight", "mla.kv_a.weight")
_BY_HEAD = ("attention.q_norm.weight", "attention.k_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMapping:
    """How a decoder parameter is stored in Megatron's model.

    ``tp_shard`` is its tensor-parallel sharding in Megatron's order. An ``expert`` tensor is sharded by its first
    dimension over expert-parallel ranks, and over the tensor-parallel ranks of an expert; Megatron has one tensor for
    each, unless they are ``stacked``. ``summed`` gradients are always partial over tensor-parallel ranks, ``by_token``
    ones under sequence parallelism. Of a packed weight ``dtype`` is that of the tensor, one column of which is ``pack``
    columns of the weight.
    """

    shape: tuple[int, ...]
    tp_shard: TpShard
    heads: tuple[int, int, int] | None = None
    expert: bool = False
    stacked: bool = False
    summed: bool = False
    by_token: bool = False
    dtype: torch.dtype | None = None
    pack: int = 1

    @property
    def by_expert(self) -> bool:
        """Whether Megatron has one tensor for each expert."""
        return self.expert and not self.stacked

    def to_megatron(self, full: Tensor) -> Tensor:
        """Reorder to Megatron's layout: per group its queries, its key, its value."""
        if self.heads is None:
            return full
        heads, groups, size = self.heads
        parts = full.split((heads * size, groups * size, groups * size))
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def from_megatron(self, arranged: Tensor) -> Tensor:
        """The inverse of ``to_megatron``."""
        if self.heads is None:
            return arranged
        heads, groups, size = self.heads
        by_group = arranged.unflatten(0, (groups, -1)).split((heads // groups * size, size, size), dim=1)
        return torch.cat([part.flatten(0, 1) for part in by_group])


@lru_cache(maxsize=8)
def build_param_mappings(
    spec: DecoderSpec,
    *,
    transformer_engine: bool,
    batch_invariant: bool = False,
    adapted: frozenset[AdaptedPart] = frozenset(),
) -> Mapping[str, ParamMapping]:
    """Map every parameter of the decoder, in the decoder's order.

    With Transformer Engine and with batch-invariant layers every tensor-parallel rank has the down-projections of MLA
    in full. Parts that are ``adapted`` are the decoder's modules. A packed parameter is several tensors.
    """
    cuts, modules = compute_tp_shards(spec), choose_modules(spec, adapted)
    plan = plan_quantization(spec)
    mappings: dict[str, ParamMapping] = {}
    for name, parts in build_param_map(spec).items():
        shape = param_shape(parts)
        if name in plan and plan[name].packed:
            mappings |= _build_packed_mappings(name, shape, plan[name], cuts)
            continue
        if modules.has_param(name):
            mappings[name] = _build_decoder_mapping(shape, cuts[name])
            continue
        even = name.endswith(_LATENT) and not (transformer_engine or batch_invariant)
        mappings[name] = _build_mapping(
            spec, name, shape, TpShard(segments=(ShardSegment(shape[0]),)) if even else cuts[name]
        )
    return mappings


def build_head_mappings(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ParamMapping]:
    """Map the parameters of a scalar head: in full on every rank of the last stage, each with the gradient of all
    the tokens of its sequences.
    """
    return {name: ParamMapping(shape=shape, tp_shard=TpShard()) for name, shape in shapes.items()}


def _build_decoder_mapping(shape: tuple[int, ...], shard: TpShard) -> ParamMapping:
    """Map a parameter of the decoder's own module, which is sharded as in the decoder."""
    by_token = not (shard.segments or shard.partial_grad or shard.first_rank_only)
    expert, summed = shard.stacked, shard.partial_grad
    return ParamMapping(shape=shape, tp_shard=shard, expert=expert, stacked=expert, summed=summed, by_token=by_token)


def _build_packed_mappings(
    name: str, shape: tuple[int, ...], quantized: QuantizedParam, shards: Mapping[str, TpShard]
) -> dict[str, ParamMapping]:
    """Map the tensors of a packed weight of a ``shape``."""
    found: dict[str, ParamMapping] = {}
    layout = packed_layout(quantized.format, shape, quantized.segments, quantized.tensor_parallel_size)
    for suffix, (packed_shape, dtype) in layout.items():
        mapping = _build_decoder_mapping(packed_shape, shards[f"{name}{suffix}"])
        pack = 1 if suffix else shape[-1] // packed_shape[-1]
        found[f"{name}{suffix}"] = replace(mapping, dtype=dtype, pack=pack)
    return found


def _build_mapping(spec: DecoderSpec, name: str, shape: tuple[int, ...], tp_shard: TpShard) -> ParamMapping:
    suffix = name.split(".", 2)[2] if name.startswith("layers.") else name
    if suffix.startswith("attention.qkv."):
        mixer = spec.layers[int(name.split(".")[1])].mixer
        assert isinstance(mixer, AttentionSpec)
        # Even runs of rows, also with more tensor-parallel ranks than key-value heads.
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
        return ParamMapping(shape=shape, tp_shard=TpShard(segments=(ShardSegment(shape[0]),)), heads=heads)
    replicated = not tp_shard.segments
    return ParamMapping(
        shape=shape,
        # Biases that are added once are replicated in Megatron, which adds them after the all-reduce.
        tp_shard=TpShard() if replicated else tp_shard,
        expert=suffix in _EXPERTS,
        summed=suffix in _BY_HEAD,
        by_token=replicated and suffix not in _BY_HEAD,
    )


def parse_layer_index(name: str) -> int | None:
    """Return the layer index of a decoder parameter, or None."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def megatron_names(name: str) -> tuple[str, ...]:
    """Return the possible names of a decoder parameter in Megatron's modules, inside its layer or the model."""
    if not name.startswith("layers."):
        return (f"residual.{name}" if name.startswith(_RESIDUAL) else _TOP.get(name, name),)
    suffix = name.split(".", 2)[2]
    module, _, last = suffix.rpartition(".")
    return _LAYER.get(suffix) or tuple(f"{there}.{last}" for there in _LAYER.get(module, ()))


def possible_names(name: str) -> tuple[str, ...]:
    """Return ``megatron_names``, and the name of a layer's parameter in a module of the decoder, which is the decoder's
    name inside Megatron's self-attention or MLP, beside these, or inside what reads residual streams.
    """
    if not name.startswith("layers."):
        return megatron_names(name)
    suffix = name.split(".", 2)[2]
    home = "self_attention" if suffix.partition(".")[0] in MIXER_NAMES else "mlp"
    home = "streams" if suffix.startswith(_STREAMS) else home
    return (*megatron_names(name), suffix if suffix.startswith("per_layer.") else f"{home}.{suffix}")


def checkpoint_names(spec: DecoderSpec, name: str) -> tuple[str, ...]:
    """Return the names of a parameter in Megatron's checkpoints, inside its layer or the model.

    Norms that Transformer Engine fuses into a projection have two.
    """
    index = parse_layer_index(name)
    if index is None:
        return megatron_names(name)
    ffn = spec.layers[index].ffn
    # Experts beside an MLP have the norm of the MLP.
    is_inner_norm = name.endswith(".mlp_norm.weight") and isinstance(ffn, MoeSpec) and ffn.beside_mlp
    if choose_modules(spec).has_param(name) or is_inner_norm or not megatron_names(name):
        return possible_names(name)[-1:]
    return megatron_names(name)
