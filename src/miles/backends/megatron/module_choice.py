"""Choice of modules per layer: Megatron's attention, MLP and experts, or the decoder's. No torch and no Megatron.

Megatron-Core has one config for all layers. A part of a layer that this config cannot describe, such as a recurrent
mixer or sparse attention, is the decoder's own module, sharded over Megatron's ranks (``decoder_modules``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from miles.models.lora.targets import LoraSpec
from miles.models.quantization import plan_quantization
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MlpSpec, MoeSpec

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations of Megatron's gated MLPs and experts."""

MIXER_NAMES = ("attention", "mla", "compressed", "delta", "kda", "mamba", "short_conv", "relative", "attention_conv")
"""Names of the decoder's mixers in its layers, and of the convolution behind one."""

FFN_NAMES = ("mlp", "moe", "mlp_conv")
"""Names of its feed-forward parts, and of the convolution behind one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice:
    """The layers whose ``mixers`` and feed-forward parts (``ffns``) are the decoder's modules.

    Those of the other layers are Megatron's, which ``attention``, ``mlp`` and ``moe`` describe; each is None if no
    layer has Megatron's.
    """

    mixers: frozenset[int]
    ffns: frozenset[int]
    attention: AttentionSpec | MlaSpec | None
    mlp: MlpSpec | None
    moe: MoeSpec | None

    @property
    def is_all_megatron(self) -> bool:
        """Whether every module is Megatron's."""
        return not (self.mixers or self.ffns)

    def has_param(self, name: str) -> bool:
        """Return whether a parameter is of a module of the decoder."""
        parts = name.split(".")
        if parts[0] != "layers":
            return False
        home = self.mixers if parts[2] in MIXER_NAMES else self.ffns if parts[2] in FFN_NAMES else frozenset[int]()
        return int(parts[1]) in home


AdaptedPart = tuple[int, str]
"""A layer and the name of its mixer or feed-forward part whose adapters, or packed base, Megatron's module cannot have.
"""


def list_adapted_parts(spec: DecoderSpec, lora: LoraSpec | None) -> frozenset[AdaptedPart]:
    """List the parts whose packed weights or adapters Megatron's modules cannot have.

    They can have merged LoRA of attention and dense MLPs: not of MLA and experts, and no DoRA, no dropout, and nothing
    beside the weights, where adapters are over a packed base.
    """
    packed = {_parse_part(name) for name, quantized in plan_quantization(spec).items() if quantized.packed}
    if lora is None:
        return frozenset(packed)
    only_merged = not (lora.use_dora or lora.dropout or lora.unmerged or packed)
    names = (target.param_name for target in lora.targets if target.param_name.startswith("layers."))
    parts = {_parse_part(name) for name in names}
    return frozenset(packed | {part for part in parts if not (only_merged and part[1] in ("attention", "mlp"))})


def _parse_part(name: str) -> AdaptedPart:
    """Return the layer and the part of a layer's parameter."""
    _, layer, part, *_ = name.split(".")
    return int(layer), part


@lru_cache(maxsize=16)
def choose_modules(spec: DecoderSpec, adapted: frozenset[AdaptedPart] = frozenset()) -> ModuleChoice:
    """Choose Megatron's modules for the layers that its one config describes, which is that of the first such layer.

    Parts that are ``adapted`` as Megatron's modules cannot be are the decoder's.
    """
    adapted_mixers = {i for i, name in adapted if name in MIXER_NAMES}
    adapted_ffns = {i for i, name in adapted if name in FFN_NAMES}
    mixers = [layer.mixer for layer in spec.layers]
    sources = {mixer.kv_source for mixer in mixers if isinstance(mixer, AttentionSpec)}
    ffns = [layer.ffn for layer in spec.layers]
    # Only the decoder's attention keeps its keys for layers that share them.
    own = {i: mixer for i, mixer in enumerate(mixers) if _has_attention(mixer, spec) and i not in sources}
    attention = next(iter(own.values()), None)
    assert attention is None or isinstance(attention, AttentionSpec | MlaSpec)
    # One setting for the biases of all outputs, and Megatron's experts have none.
    bias = isinstance(attention, AttentionSpec) and attention.output_bias
    mlp = next((ffn for ffn in ffns if isinstance(ffn, MlpSpec) and _has_mlp(ffn) and ffn.bias == bias), None)
    moe = next((ffn for ffn in ffns if isinstance(ffn, MoeSpec) and _has_moe(ffn) and not bias), None)
    return ModuleChoice(
        mixers=frozenset(
            i
            for i, mixer in enumerate(mixers)
            if i in adapted_mixers or (mixer is not None and not (i in own and _sizes(mixer) == _sizes(attention)))
        ),
        ffns=frozenset(
            i for i, ffn in enumerate(ffns) if i in adapted_ffns or (ffn is not None and ffn not in (mlp, moe))
        ),
        attention=attention,
        mlp=mlp,
        moe=moe,
    )


def has_stacked_layers(spec: DecoderSpec) -> bool:
    """Return whether Megatron's checkpoints have one tensor for a parameter of all layers, which are of one kind."""
    alike = all(layer.mixer is not None and layer.ffn is not None for layer in spec.layers)
    return alike and spec.moe is None and choose_modules(spec).is_all_megatron


def can_use_transformer_engine(spec: DecoderSpec) -> bool:
    """Return whether layers may be Transformer Engine's, which fuses norms, without an offset, into projections."""
    return choose_modules(spec).is_all_megatron and not spec.norm_offset


def _has_attention(mixer: object, spec: DecoderSpec) -> bool:
    """Return whether Megatron has such a mixer."""
    if isinstance(mixer, MlaSpec):
        is_plain = mixer.indexer is None and not mixer.bias and mixer.temperature is None and mixer.rope is not None
        return is_plain and mixer.norm_eps == spec.norm_eps and not spec.norm_offset
    if not isinstance(mixer, AttentionSpec) or mixer.qk_norm not in ("none", "head"):
        return False
    if mixer.output_bias and (not mixer.qkv_bias or spec.moe is not None):
        return False
    differs = mixer.sinks or mixer.gated or mixer.head_gate or mixer.value_norm or mixer.value_from_key
    return not (differs or mixer.kv_source is not None or mixer.indexer is not None)


def _has_mlp(mlp: MlpSpec) -> bool:
    is_plain = not (mlp.sparsity or mlp.interleaved or mlp.learned_scale)
    return mlp.gated and is_plain and mlp.activation in ACTIVATIONS


def _has_moe(moe: MoeSpec) -> bool:
    """Return whether Megatron has such experts and such a router."""
    own_experts = not moe.gated or moe.activation not in ACTIVATIONS or moe.interleaved or moe.expert_bias
    own_experts = own_experts or moe.latent is not None or moe.weigh_input or moe.beside_mlp or moe.weighed_shared > 0
    own_router = moe.score == "sqrtsoftplus" or moe.router_bias or bool(moe.hash_vocab)
    own_router |= moe.score == "sigmoid" and not moe.norm_topk_prob
    own_router |= moe.score == "softmax" and moe.correction
    own_router |= moe.experts_per_token == 1 and moe.norm_topk_prob
    own_router |= moe.groups > 1 and moe.experts_per_token // moe.kept_groups != moe.group_top
    shared = moe.shared
    own_shared = shared is not None and (shared.bias or not _has_mlp(shared) or shared.activation != moe.activation)
    return not (own_experts or own_router or own_shared)


def _sizes(mixer: object) -> object:
    """Return everything that must be equal in all of Megatron's layers."""
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.qk_norm, mixer.qkv_bias, mixer.output_bias
    return mixer
