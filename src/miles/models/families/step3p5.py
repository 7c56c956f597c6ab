"""Step-3.5 and the text model of Step-3.7: attention with a gate for each head, experts with a limited SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.kernels.activation_kinds import ActivationKind, limited_swiglu
from miles.models.families import mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import read_text_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_THETA = 10_000.0
_FIRST_MOE_LAYER = 3

# Keys of published configs, and what other families call them; transformers takes either.
_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
# Lists with one entry per layer, in published configs also for the multi-token-prediction layers behind them.
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)
_FULL, _SLIDING = "full_attention", "sliding_attention"

_NAMES = {
    "moe": "moe",
    "correction": "router_bias",
    "stacked": "separate",
    "experts_gate": "gate_proj.weight",
    "experts_up": "up_proj.weight",
    "experts_down": "down_proj.weight",
    "shared": "../share_expert",
}
_VISION = ("vision_model.", "vit_large_projector.")


def read(config: Mapping[str, Any], family: str = "step3p5") -> DecoderSpec:
    """The text model: Step-3.5, or the one inside Step-3.7."""
    reader = ConfigReader(_rename_keys(config), family)
    _require_supported(reader)
    common = reader.common_args(eps=_EPS)
    count = reader.positive_int("num_hidden_layers")
    kinds = reader.layer_types(lambda i: _FULL, _FULL, _SLIDING)
    mixers = _read_attention(reader, kinds)
    bias = reader.flag("mlp_bias")
    limits, shared_limits = (_read_activations(reader, key, count) for key in ("swiglu_limits", "swiglu_limits_shared"))
    size, shared_size = reader.positive_int("intermediate_size"), reader.positive_int("share_expert_dim")
    experts = reader.expert_counts("n_routed_experts")
    expert_size, scale = reader.positive_int("moe_intermediate_size"), reader.number("moe_router_scaling_factor", 1.0)

    def build_ffn(layer: int, sparse: bool) -> MlpSpec | MoeSpec:
        if not sparse:
            return MlpSpec(size=size, bias=bias, activation=shared_limits[layer])
        return MoeSpec(
            **experts,
            size=expert_size,
            norm_topk_prob=True,
            score="sigmoid",
            correction=True,
            scale=scale,
            activation=limits[layer],
            shared=MlpSpec(size=shared_size, bias=bias, activation=shared_limits[layer]),
        )

    sparse = _read_moe_layers(reader, count)
    pairs = zip(kinds, sparse, strict=False)  # a list of another length was rejected
    layers = [LayerSpec(mixer=mixers[kind], ffn=build_ffn(i, has)) for i, (kind, has) in enumerate(pairs)]
    return reader.build_spec(common, layers, norm_offset=1.0)


def read_wrapped(config: Mapping[str, Any]) -> DecoderSpec:
    """Step-3.7, of which only the text model is computed here."""
    return read(read_text_config(config, {}, family="step3p7"), family="step3p7")


def _rename_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys that ``ConfigReader`` reads, and lists without multi-token-prediction layers."""
    renamed = {_KEYS.get(key, key): value for key, value in config.items()}
    count, more = renamed.get("num_hidden_layers"), renamed.get("num_nextn_predict_layers") or 0
    if isinstance(count, int) and isinstance(more, int):
        for key in _LISTS:
            if isinstance(renamed.get(key), list) and len(renamed[key]) == count + more:
                renamed[key] = renamed[key][:count]
    return renamed


def _require_supported(reader: ConfigReader) -> None:
    """Reject options of the published configs that are not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("use_moe", True)
    reader.require("use_qk_norm", True)
    reader.require("use_head_wise_attn_gate", True)
    reader.require("att_impl_type", "GQA")
    reader.require("zero_centered", True)
    reader.require("sink", False, None)
    reader.require("use_rope_layers", None, [])
    reader.require("yarn_only_types", None, [_FULL])
    reader.require("moe_router_activation", "sigmoid")
    reader.require("norm_expert_weight", True)
    reader.require("use_moe_router_bias", True)
    reader.require("use_bidirectional_attention", False, None)


def _read_attention(reader: ConfigReader, kinds: Sequence[str]) -> dict[str, AttentionSpec]:
    """Read the attention of each kind of layer: sliding windows may have another number of heads."""
    heads = reader.attention_heads(head_dim=_HEAD_DIM)
    other: Mapping[str, Any] = reader.config.get("attention_other_setting") or {}
    for key, own in (("num_attention_groups", heads["num_kv_heads"]), ("head_dim", heads["head_dim"])):
        if other.get(key, own) != own:
            reader.reject(f"attention_other_setting.{key}", f"is {other[key]!r}, but only {own} is implemented")
    sliding_heads = reader.config.get("num_sliding_attention_heads") or other.get("num_attention_heads")
    sliding_heads = heads["num_heads"] if sliding_heads is None else sliding_heads
    if type(sliding_heads) is not int or sliding_heads < 1 or sliding_heads % heads["num_kv_heads"]:
        reader.reject(
            "num_sliding_attention_heads",
            f"is {sliding_heads!r}, but must be a multiple of the {heads['num_kv_heads']} key-value heads",
        )
        sliding_heads = heads["num_heads"]
    window = reader.positive_int("sliding_window") if _SLIDING in kinds else None
    bias, scalar = reader.flag("attention_bias"), reader.optional_positive("query_pre_attn_scalar")
    common: dict[str, Any] = {
        "num_kv_heads": heads["num_kv_heads"],
        "head_dim": heads["head_dim"],
        "qk_norm": "head",
        "qkv_bias": bias,
        "output_bias": bias,
        "scale": None if scalar is None else scalar**-0.5,
        "head_gate": True,
    }
    return {
        kind: AttentionSpec(
            **common,
            num_heads=sliding_heads if kind == _SLIDING else heads["num_heads"],
            rope=_read_rope(reader, kind, kinds, heads["head_dim"]),
            window=window if kind == _SLIDING else None,
        )
        for kind in sorted(set(kinds))
    }


def _read_rope(reader: ConfigReader, kind: str, kinds: Sequence[str], head_dim: int) -> RopeSpec:
    """Read the RoPE of a kind of layer: by its name, or as published by the number of its first layer.

    ``rope_scaling`` of published configs is for full attention alone.
    """
    config = reader.config
    given = (config.get("rope_parameters") or {}).get(kind)
    if not isinstance(given, Mapping):
        theta, parts = (_of_layer(reader, key, kinds.index(kind)) for key in ("rope_theta", "partial_rotary_factors"))
        given = {"rope_theta": _THETA if theta is None else theta}
        given |= {} if parts is None else {"partial_rotary_factor": parts}
        given |= dict(config.get("rope_scaling") or {}) if kind == _FULL else {}
    own = ConfigReader({**config, "rope_scaling": None, "rope_theta": None, "rope_parameters": given}, reader.family)
    rope = own.rope(head_dim=head_dim, theta=_THETA)
    reader.problems += [problem for problem in own.problems if problem not in reader.problems]
    return rope


def _of_layer(reader: ConfigReader, key: str, layer: int) -> Any:
    """Read the value of a layer from a list with one per layer, or the one of all layers."""
    value = reader.config.get(key)
    if not isinstance(value, list):
        return value
    if layer >= len(value):
        reader.reject(key, f"names {len(value)} layers, which are fewer than there are")
        return None
    return value[layer]


def _read_activations(reader: ConfigReader, key: str, count: int) -> list[ActivationKind]:
    """Read the activation of each layer from its limit; 0 and null are none."""
    limits = reader.config.get(key)
    if limits is None:
        return ["silu"] * count
    sound = isinstance(limits, list) and all(x is None or (type(x) in (int, float) and x >= 0) for x in limits)
    if not sound or len(limits) != count:
        reader.reject(key, f"is {limits!r}, but must be a list of {count} numbers of 0 or more")
        return ["silu"] * count
    return [limited_swiglu(limit, behind=True) if limit else "silu" for limit in limits]


def _read_moe_layers(reader: ConfigReader, count: int) -> tuple[bool, ...]:
    """Read which layers have experts: from ``mlp_layer_types``, else from the numbers of the published config."""
    numbers = reader.config.get("moe_layers_enum")
    if reader.config.get("mlp_layer_types") is not None or numbers is None:
        return mla.read_moe_layers(reader, default=_FIRST_MOE_LAYER)
    words = [word.strip() for word in numbers.split(",")] if isinstance(numbers, str) else [str(n) for n in numbers]
    if not all(word.isdecimal() for word in words if word):
        reader.reject("moe_layers_enum", f"is {numbers!r}, but must be the numbers of layers")
        return (False,) * count
    named = {int(word) for word in words if word}
    return tuple(i in named for i in range(count))


def _is_mtp_or_vision(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers, and the vision tower with its projector."""
    return hf_name.startswith(_VISION) or mla.is_mtp_layer(spec, hf_name)


FAMILIES = (
    ModelFamily(
        model_type="step3p5",
        architectures=("Step3p5ForCausalLM",),
        models="Step-3.5-Flash",
        read=read,
        names=_NAMES,
        is_unused=mla.is_mtp_layer,
    ),
    ModelFamily(
        model_type="step3p7",
        architectures=("Step3p7ForConditionalGeneration",),
        models="Step-3.7-Flash, text only",
        read=read_wrapped,
        names=_NAMES,
        is_unused=_is_mtp_or_vision,
    ),
)
