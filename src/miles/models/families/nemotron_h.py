"""Nemotron-H and Nemotron-3: each layer is Mamba-2, attention that knows no positions, an MLP, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_KERNEL = 4
_GROUPS = 8
_STATE = 128
_MAMBA_HEADS = 128
_MAMBA_DIM = 64
# The best so many of a group of experts say what the group is worth.
_GROUP_TOP = 2

# The letters of a hybrid_override_pattern, and what kinds are called in a list, now and before.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in _LETTERS.values()}
# What some configs call a key, by the name others have for it.
_OLDER = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    config = {**config, **{new: config[old] for new, old in _OLDER.items() if old in config}}
    fields = Fields(config, "nemotron_h")
    common: dict[str, Any] = {**fields.common(), "norm_eps": fields.number("layer_norm_epsilon", _EPS)}
    kinds = _kinds(fields)
    # Older models have no experts, and newer ones no plain MLP.
    parts = {kind: _PARTS[kind](fields) for kind in dict.fromkeys(kinds)}
    for key, only in _ONLY.items():
        fields.only(key, *only)
    fields.settle()
    return DecoderSpec(**common, layers=tuple(parts[kind] for kind in kinds))


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Each layer's kind: from a list under either of its names, or from a pattern of letters."""
    key = next((key for key in ("layers_block_type", "layer_types") if fields.config.get(key) is not None), None)
    known, key = (_LETTERS, "hybrid_override_pattern") if key is None else (_KINDS, key)
    named = fields.config.get(key)
    if not isinstance(named, str | list | tuple) or not named:
        fields.refuse(key, f"is {named!r}, but must say what each layer is")
        return ()
    if strange := sorted(set(named) - set(known)):
        fields.refuse(key, f"has a layer of kind {strange[0]!r}, which is not implemented")
    return tuple(known[each] for each in named if each in known)


def _mamba(fields: Fields) -> LayerSpec:
    mixer = MambaSpec(
        num_heads=fields.whole("mamba_num_heads", _MAMBA_HEADS),
        head_dim=fields.whole("mamba_head_dim", _MAMBA_DIM),
        state_dim=fields.whole("ssm_state_size", _STATE),
        groups=fields.whole("n_groups", _GROUPS),
        kernel=fields.whole("conv_kernel", _KERNEL),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias"),
        step_limit=_limit(fields),
    )
    if mixer.num_heads % mixer.groups and not fields.problems:
        fields.refuse("n_groups", f"is {mixer.groups}, which does not divide the {mixer.num_heads} heads")
    return LayerSpec(mixer=mixer, ffn=None)


def _limit(fields: Fields) -> tuple[float, float]:
    """The shortest and the longest step.

    JSON knows no infinity: Python's own way to write one, and transformers', are both read. ``time_step_min`` and its
    like only say how fresh weights are drawn.
    """
    given: Any = fields.config.get("time_step_limit", (0.0, float("inf")))
    pair: list[Any] = [x.get("__float__") if isinstance(x, Mapping) else x for x in given]
    try:
        least, most = (float(x) for x in pair)
    except (TypeError, ValueError):
        least, most = 1.0, 0.0
    if not 0 <= least <= most:
        fields.refuse("time_step_limit", f"is {given!r}, but must be two ascending numbers from 0 on")
    return least, most


def _attention(fields: Fields) -> LayerSpec:
    return LayerSpec(mixer=AttentionSpec(**fields.heads(head_dim=_HEAD_DIM), rope=None), ffn=None)


def _mlp(fields: Fields) -> LayerSpec:
    size, bias = fields.whole("intermediate_size"), fields.flag("mlp_bias")
    return LayerSpec(mixer=None, ffn=MlpSpec(size=size, activation="relu2", gated=False, bias=bias))


def _moe(fields: Fields) -> LayerSpec:
    bias, latent = fields.flag("mlp_bias"), fields.config.get("moe_latent_size")
    shared = fields.whole("moe_shared_expert_intermediate_size")
    moe = MoeSpec(
        **fields.experts("n_routed_experts", "num_local_experts"),
        size=fields.whole("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        score="sigmoid",
        correction=True,
        groups=fields.whole("n_group", 1),
        kept_groups=fields.whole("topk_group", 1),
        group_top=_GROUP_TOP,
        scale=fields.number("routed_scaling_factor", 1.0),
        activation="relu2",
        gated=False,
        latent=None if latent is None else fields.whole("moe_latent_size"),
        latent_bias=bias,
        shared=MlpSpec(size=shared, activation="relu2", gated=False, bias=bias),
    )
    if moe.num_experts % moe.groups and not fields.problems:
        fields.refuse("n_group", f"is {moe.groups}, which does not divide the {moe.num_experts} experts")
    return LayerSpec(mixer=None, ffn=moe)


_PARTS = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _moe}
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "attention_bias": (False,),
    "mamba_proj_bias": (False,),
    "sliding_window": (None,),
    "residual_in_fp32": (False,),
    "hidden_dropout": (0.0,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
}


def _ahead(spec: DecoderSpec, hf_name: str) -> bool:
    """The layers that predict several tokens ahead."""
    return hf_name.startswith("mtp.")


FAMILIES = (
    Family(
        model_type="nemotron_h",
        architectures=("NemotronHForCausalLM",),
        models="Nemotron-3 Nano and Super, Nemotron-H, Nemotron Nano 2",
        read=read,
        names={
            "embedding": "backbone.embeddings",
            "layer": "backbone.layers.{}",
            "norm": "backbone.norm_f",
            "attention_norm": "norm",
            "mlp_norm": "norm",
            "attention": "mixer",
            "mlp": "mixer",
            "moe": "mixer",
        },
        spare=_ahead,
    ),
)
