"""Nemotron-H and Nemotron-3: each layer is Mamba-2, attention without RoPE, an MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MambaSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_KERNEL = 4
_GROUPS = 8
_STATE = 128
_MAMBA_HEADS = 128
_MAMBA_DIM = 64
# A group of experts is scored by its best two experts.
_GROUP_TOP = 2

# The letters of a hybrid_override_pattern, and the layer types of a list in newer and older configs.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in _LETTERS.values()}
# Key -> the name that some configs have for it.
_ALIASES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    config = {**config, **{new: config[old] for new, old in _ALIASES.items() if old in config}}
    reader = ConfigReader(config, "nemotron_h")
    common: dict[str, Any] = {**reader.common_args(), "norm_eps": reader.number("layer_norm_epsilon", _EPS)}
    kinds = _kinds(reader)
    # Older models have no experts, and newer ones no MLP.
    parts = {kind: _PARTS[kind](reader) for kind in dict.fromkeys(kinds)}
    for key, allowed in _REQUIRED.items():
        reader.require(key, *allowed)
    return reader.build_spec(common, (parts[kind] for kind in kinds))


def _kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Read each layer's type: from a list under either of its names, or from a pattern of letters."""
    key = next((key for key in ("layers_block_type", "layer_types") if reader.config.get(key) is not None), None)
    known, key = (_LETTERS, "hybrid_override_pattern") if key is None else (_KINDS, key)
    named = reader.config.get(key)
    if not isinstance(named, str | list | tuple) or not named:
        reader.reject(key, f"is {named!r}, but must say what each layer is")
        return ()
    if unknown := sorted(set(named) - set(known)):
        reader.reject(key, f"has a layer of kind {unknown[0]!r}, which is not implemented")
    return tuple(known[each] for each in named if each in known)


def _mamba(reader: ConfigReader) -> LayerSpec:
    mixer = MambaSpec(
        num_heads=reader.positive_int("mamba_num_heads", _MAMBA_HEADS),
        head_dim=reader.positive_int("mamba_head_dim", _MAMBA_DIM),
        state_dim=reader.positive_int("ssm_state_size", _STATE),
        groups=reader.positive_int("n_groups", _GROUPS),
        kernel=reader.positive_int("conv_kernel", _KERNEL),
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias"),
        step_limit=_limit(reader),
    )
    if mixer.num_heads % mixer.groups and not reader.problems:
        reader.reject("n_groups", f"is {mixer.groups}, which does not divide the {mixer.num_heads} heads")
    return LayerSpec(mixer=mixer, ffn=None)


def _limit(reader: ConfigReader) -> tuple[float, float]:
    """Read the smallest and the largest time step.

    JSON has no infinity: both Python's and transformers' way to write it are read. ``time_step_min`` and similar keys
    only affect random initialization.
    """
    given: Any = reader.config.get("time_step_limit", (0.0, float("inf")))
    pair: list[Any] = [x.get("__float__") if isinstance(x, Mapping) else x for x in given]
    try:
        least, most = (float(x) for x in pair)
    except (TypeError, ValueError):
        least, most = 1.0, 0.0
    if not 0 <= least <= most:
        reader.reject("time_step_limit", f"is {given!r}, but must be two ascending numbers from 0 on")
    return least, most


def _attention(reader: ConfigReader) -> LayerSpec:
    return LayerSpec(mixer=AttentionSpec(**reader.attention_heads(head_dim=_HEAD_DIM), rope=None), ffn=None)


def _mlp(reader: ConfigReader) -> LayerSpec:
    size, bias = reader.positive_int("intermediate_size"), reader.flag("mlp_bias")
    return LayerSpec(mixer=None, ffn=MlpSpec(size=size, activation="relu2", gated=False, bias=bias))


def _moe(reader: ConfigReader) -> LayerSpec:
    bias, latent = reader.flag("mlp_bias"), reader.config.get("moe_latent_size")
    shared = reader.positive_int("moe_shared_expert_intermediate_size")
    moe = MoeSpec(
        **reader.expert_counts("n_routed_experts", "num_local_experts"),
        size=reader.positive_int("moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        score="sigmoid",
        correction=True,
        groups=reader.positive_int("n_group", 1),
        kept_groups=reader.positive_int("topk_group", 1),
        group_top=_GROUP_TOP,
        scale=reader.number("routed_scaling_factor", 1.0),
        activation="relu2",
        gated=False,
        latent=None if latent is None else reader.positive_int("moe_latent_size"),
        latent_bias=bias,
        shared=MlpSpec(size=shared, activation="relu2", gated=False, bias=bias),
    )
    if moe.num_experts % moe.groups and not reader.problems:
        reader.reject("n_group", f"is {moe.groups}, which does not divide the {moe.num_experts} experts")
    return LayerSpec(mixer=None, ffn=moe)


_PARTS = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _moe}
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
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


def _is_mtp(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers."""
    return hf_name.startswith("mtp.")


FAMILIES = (
    ModelFamily(
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
        is_unused=_is_mtp,
    ),
)
