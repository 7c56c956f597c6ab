"""Our parameter names in Megatron's model: what they are called there, how they lie and how ranks cut them.

Megatron keeps queries, keys and values of a group of heads together, an expert in a module of its own, and cuts evenly
over its tensor ranks. Which part a rank has follows from the spec alone, so weights move between any two layouts, and
in and out of Hugging Face checkpoints, without anything being written in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from miles.models.names import pieces
from miles.models.pieces import shape_of
from miles.models.shard import Part, Share, shares
from miles.models.spec import AttentionSpec, DecoderSpec

# Ours -> what Megatron calls it in a layer: where Transformer Engine fuses a norm into the projection behind it, the
# second name. ``{}`` counts a rank's experts.
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
    "mlp_norm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
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
TIED = "embedding.weight"
"""The parameter that the last stage has a copy of, where the head is tied."""

_EXPERTS = ("moe.gate_up", "moe.down")
# Latents: cut over the tensor ranks, but for those of Transformer Engine.
_LATENT = ("mla.q_a.weight", "mla.kv_a.weight")
_BY_HEAD = ("attention.q_norm.weight", "attention.k_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """How a parameter of ours lies in Megatron's model.

    ``share`` is how tensor ranks cut it once it is ``arranged``. An ``expert`` tensor is dealt out by its first
    dimension over the expert ranks, and cut over the tensor ranks of an expert. ``summed`` gradients are summands over
    the tensor ranks always, ``by_token`` ones where these share tokens.
    """

    shape: tuple[int, ...]
    share: Share
    heads: tuple[int, int, int] | None = None
    expert: bool = False
    summed: bool = False
    by_token: bool = False

    def arranged(self, whole: Tensor) -> Tensor:
        """Ours as Megatron orders it: a group's queries, its key, its value."""
        if self.heads is None:
            return whole
        heads, groups, size = self.heads
        parts = whole.split((heads * size, groups * size, groups * size))
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def restored(self, arranged: Tensor) -> Tensor:
        """The inverse."""
        if self.heads is None:
            return arranged
        heads, groups, size = self.heads
        by_group = arranged.unflatten(0, (groups, -1)).split((heads // groups * size, size, size), dim=1)
        return torch.cat([part.flatten(0, 1) for part in by_group])


@lru_cache(maxsize=8)
def homes(spec: DecoderSpec, *, engine: bool) -> Mapping[str, Home]:
    """How every parameter of the decoder lies, in its own order, also where layers are Transformer ``engine``'s."""
    cuts = shares(spec)
    made: dict[str, Home] = {}
    for name, parts in pieces(spec).items():
        shape = shape_of(parts)
        even = name.endswith(_LATENT) and not engine
        made[name] = _home(spec, name, shape, Share(parts=(Part(shape[0]),)) if even else cuts[name])
    return made


def _home(spec: DecoderSpec, name: str, shape: tuple[int, ...], share: Share) -> Home:
    leaf = name.split(".", 2)[2] if name.startswith("layers.") else name
    if leaf.startswith("attention.qkv."):
        mixer = spec.layers[int(name.split(".")[1])].mixer
        assert isinstance(mixer, AttentionSpec)
        # Even runs of rows, also where tensor ranks are more than key-value heads.
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
        return Home(shape=shape, share=Share(parts=(Part(shape[0]),)), heads=heads)
    whole = not share.parts
    return Home(
        shape=shape,
        # What is added once is whole on every rank of Megatron's: it adds it behind the sum.
        share=Share() if whole else share,
        expert=leaf in _EXPERTS,
        summed=leaf in _BY_HEAD,
        by_token=whole and leaf not in _BY_HEAD,
    )


def layer_of(name: str) -> int | None:
    """Which layer a parameter of ours is in, if any."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def theirs(name: str) -> tuple[str, ...]:
    """What Megatron may call a parameter of ours, inside its layer or inside the model."""
    if not name.startswith("layers."):
        return (_TOP[name],)
    leaf = name.split(".", 2)[2]
    if leaf in _LAYER:
        return _LAYER[leaf]
    module, _, last = leaf.rpartition(".")
    return tuple(f"{there}.{last}" for there in _LAYER[module])
