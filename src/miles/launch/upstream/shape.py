"""Shape and architecture flags of Megatron, each compared with the spec of the checkpoint.

A check takes the spec and config.json and returns what the flag must say: a value, several of which each is right, a
``Limit``, or None where the checkpoint does not say.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from miles.config.value_types import format_value
from miles.kernels.activation_kinds import is_limited
from miles.models.accounting.known_models import find_known_config
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    IndexerSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
)

_LAYER_TERM = re.compile(r"\[\s*(?P<value>[01])\s*\]\s*\*\s*(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number that is right."""

    value: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A spec and what the checks ask of it most."""

    spec: DecoderSpec
    config: Mapping[str, Any]

    @property
    def attention(self) -> AttentionSpec | MlaSpec | None:
        """The first attention layer."""
        found = (layer.mixer for layer in self.spec.layers)
        return next((mixer for mixer in found if isinstance(mixer, AttentionSpec | MlaSpec)), None)

    @property
    def mla(self) -> MlaSpec | None:
        return self.attention if isinstance(self.attention, MlaSpec) else None

    @property
    def softmax(self) -> AttentionSpec | None:
        return self.attention if isinstance(self.attention, AttentionSpec) else None

    @property
    def indexer(self) -> IndexerSpec | None:
        return None if self.mla is None else self.mla.indexer

    @property
    def ropes(self) -> list[RopeSpec]:
        mixers = (layer.mixer for layer in self.spec.layers)
        return [m.rope for m in mixers if isinstance(m, AttentionSpec | MlaSpec) and m.rope is not None]

    @property
    def mlps(self) -> list[MlpSpec]:
        return [layer.ffn for layer in self.spec.layers if isinstance(layer.ffn, MlpSpec)]

    @property
    def moe(self) -> MoeSpec | None:
        return self.spec.moe

    def get_rope_key(self, key: str) -> Any:
        """A key of ``rope_scaling`` or ``rope_parameters``."""
        for name in ("rope_scaling", "rope_parameters"):
            value = self.config.get(name)
            if isinstance(value, dict) and value.get(key) is not None:
                return value[key]
        return None


def find_shape_problem(flag: str, words: Sequence[str], spec: DecoderSpec, config: Mapping[str, Any]) -> str | None:
    """A sentence about a flag that disagrees with the checkpoint; None where it agrees. KeyError: it is not known."""
    if flag == "--model-name":
        return _find_name_problem(words, config)
    expected = get_expected(flag, spec, config)
    if expected is None:
        raise KeyError(flag)
    said = " ".join(words)
    line = f"{flag} {said}".rstrip()
    if isinstance(expected, bool):
        if expected and not said:
            return None
        says = "so, without a value" if expected else "otherwise"
        return f"{line} disagrees with config.json of --hf-checkpoint, which says {says}; remove it."
    if isinstance(expected, Limit):
        limit = _parse_number(said)
        agrees = limit is not None and limit <= expected.value
        text = f"at most {expected.value}"
    else:
        several = expected if isinstance(expected, tuple) else (expected,)
        agrees = any(_agrees(said, value) for value in several)
        text = " or ".join(dict.fromkeys(_format_expected(value) for value in several))
    return None if agrees else f"{line} disagrees with config.json of --hf-checkpoint, which says {text}; remove it."


def get_expected(flag: str, spec: DecoderSpec, config: Mapping[str, Any]) -> Any:
    """What a flag must say about the checkpoint, None where that is not known."""
    if isinstance(spec, HfAdapterSpec) and flag not in _PLAIN:
        return None
    check = _CHECKS.get(flag)
    text = config.get("text_config")
    return None if check is None else check(Shape(spec, text if isinstance(text, dict) else config))


def _format_expected(value: Any) -> str:
    """A value as the flag takes it; the layers with experts as ``[0]*3+[1]*58``."""
    if not isinstance(value, list):
        return format_value(value)
    return "+".join(f"[{each}]*{len(list(run))}" for each, run in groupby(value))


def _agrees(said: str, value: Any) -> bool:
    if isinstance(value, str):
        return said.lower() == value.lower()
    if isinstance(value, list):
        return _parse_layers(said, len(value)) == value
    number = _parse_number(said)
    return number is not None and math.isclose(number, value, rel_tol=1e-6)


def _parse_number(text: str) -> float | None:
    try:
        return float(text.strip("()").split(",")[0])
    except ValueError:
        return None


def _parse_layers(text: str, count: int) -> list[int] | None:
    """Which layers have experts: ``[0]*3+[1]*58``, a list of both, or N for every Nth layer.

    >>> _parse_layers("([0]*1+[1]*3)", 4)
    [0, 1, 1, 1]
    """
    plain = text.replace(" ", "").strip("()")
    if plain.isdecimal() and int(plain):
        return [int(i % int(plain) == 0) for i in range(count)]
    if re.fullmatch(r"\[[01](,[01])*\]", plain):
        return [int(each) for each in plain[1:-1].split(",")]
    terms = [_LAYER_TERM.fullmatch(term.strip("()")) for term in plain.split("+")]
    layers: list[int] = []
    for term in terms:
        if term is None:
            return None
        layers += [int(term["value"])] * min(int(term["count"]), 10_000)
    return layers


def _find_name_problem(words: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """A name is compared where it is a published model's: then the architectures must be the same."""
    known = find_known_config(" ".join(words))
    theirs, ours = _get_architecture(known or {}), _get_architecture(config)
    if theirs is None or ours is None:
        raise KeyError("--model-name")
    if theirs == ours:
        return None
    return f"--model-name {' '.join(words)} is a {theirs}, but --hf-checkpoint is a {ours}; correct one of them."


def _get_architecture(config: Mapping[str, Any]) -> str | None:
    return next(iter(config.get("architectures") or ()), None)


# -- what each flag must say ----------------------------------------------------------------

_Check = Callable[[Shape], Any]


def _get_ffn_sizes(s: Shape) -> tuple[int, ...]:
    sizes = [mlp.size for mlp in s.mlps] + ([] if s.moe is None else [s.moe.size])
    named = s.config.get("intermediate_size")
    return tuple(dict.fromkeys([*sizes, *([named] if isinstance(named, int) else [])]))


def _get_moe(read: Callable[[MoeSpec], Any]) -> _Check:
    return lambda s: None if s.moe is None else read(s.moe)


def _get_mla(read: Callable[[MlaSpec], Any]) -> _Check:
    return lambda s: None if s.mla is None else read(s.mla)


def _get_indexer(read: Callable[[IndexerSpec], int]) -> _Check:
    return lambda s: None if s.indexer is None else read(s.indexer)


def _get_rope(read: Callable[[RopeSpec], Any]) -> _Check:
    """The values of all layers; a flag may say any of them."""
    return lambda s: tuple(dict.fromkeys(read(rope) for rope in s.ropes)) or None


def _get_rotary_percent(s: Shape) -> Any:
    found = s.softmax
    if found is None or found.rope is None:
        return None if s.mla is None else 1.0
    return (found.rope.dim or found.head_dim) / found.head_dim


def _get_embedding_types(s: Shape) -> tuple[str, ...]:
    return ("rope", *dict.fromkeys("yarn" for rope in s.ropes if rope.kind == "yarn")) if s.ropes else ("none",)


def _has_no_linear_bias(s: Shape) -> bool:
    softmax, mla = s.softmax, s.mla
    biases = [softmax is not None and softmax.output_bias, mla is not None and mla.bias, *(m.bias for m in s.mlps)]
    return not any(biases) and not (s.moe is not None and s.moe.expert_bias)


def _is_gated_silu(s: Shape) -> bool:
    parts = [*s.mlps, *([] if s.moe is None else [s.moe])]
    kinds = ("silu", "swiglu_clamped")
    return bool(parts) and all(p.gated and (p.activation in kinds or is_limited(p.activation)) for p in parts)


def _get_windows(s: Shape) -> tuple[int, ...] | None:
    found = {m.mixer.window for m in s.spec.layers if isinstance(m.mixer, AttentionSpec) and m.mixer.window}
    return tuple(sorted({size for window in found for size in (window, window - 1)})) or None


def _get_attention_variants(s: Shape) -> tuple[str, ...] | None:
    variants = ["gated_delta_net"] if any(isinstance(x.mixer, GatedDeltaNetSpec) for x in s.spec.layers) else []
    return tuple(variants + (["dsa"] if s.indexer is not None else [])) or None


def _get_layer_freq(s: Shape) -> list[int] | None:
    return None if s.moe is None else [int(isinstance(layer.ffn, MoeSpec)) for layer in s.spec.layers]


def _get_head_dim(s: Shape) -> int | None:
    return None if s.softmax is None else s.softmax.head_dim


_PLAIN = ("--num-layers", "--hidden-size", "--vocab-size", "--seq-length", "--max-position-embeddings")
_CHECKS: Mapping[str, _Check] = {
    "--num-layers": lambda s: s.spec.num_layers,
    "--hidden-size": lambda s: s.spec.hidden_size,
    "--vocab-size": lambda s: s.spec.vocab_size,
    "--seq-length": lambda s: Limit(s.spec.max_positions),
    "--max-position-embeddings": lambda s: Limit(s.spec.max_positions),
    "--ffn-hidden-size": lambda s: _get_ffn_sizes(s) or None,
    "--swiglu": _is_gated_silu,
    "--squared-relu": lambda s: any(part.activation == "relu2" for part in [*s.mlps, *([s.moe] if s.moe else [])]),
    "--activation-func-clamp-value": lambda s: s.config.get("swiglu_limit"),
    "--normalization": lambda s: "RMSNorm",
    "--norm-epsilon": lambda s: s.spec.norm_eps,
    "--apply-layernorm-1p": lambda s: s.spec.norm_offset == 1.0,
    "--post-self-attn-layernorm": lambda s: any(layer.post_norms for layer in s.spec.layers),
    "--post-mlp-layernorm": lambda s: any(layer.post_norms for layer in s.spec.layers),
    "--untie-embeddings-and-output-weights": lambda s: not s.spec.tie_embeddings,
    "--disable-bias-linear": _has_no_linear_bias,
    # attention
    "--num-attention-heads": lambda s: None if s.attention is None else s.attention.num_heads,
    "--group-query-attention": lambda s: True if s.softmax is not None else None,
    "--num-query-groups": lambda s: (
        s.config.get("num_key_value_heads") if s.softmax is None else s.softmax.num_kv_heads
    ),
    "--kv-channels": _get_head_dim,
    "--add-qkv-bias": lambda s: None if s.softmax is None else s.softmax.qkv_bias,
    "--qk-layernorm": lambda s: s.mla is not None or (s.softmax is not None and s.softmax.qk_norm != "none"),
    "--attention-output-gate": lambda s: None if s.softmax is None else s.softmax.gated,
    "--softmax-type": lambda s: None if s.softmax is None else "learnable" if s.softmax.sinks else "vanilla",
    "--window-size": _get_windows,
    "--experimental-attention-variant": _get_attention_variants,
    "--dsa-indexer-n-heads": _get_indexer(lambda i: i.num_heads),
    "--dsa-indexer-head-dim": _get_indexer(lambda i: i.head_dim),
    "--dsa-indexer-topk": _get_indexer(lambda i: i.top),
    # positions
    "--position-embedding-type": _get_embedding_types,
    "--use-rotary-position-embeddings": lambda s: bool(s.ropes),
    "--no-position-embedding": lambda s: True,
    "--rotary-base": _get_rope(lambda r: r.theta),
    "--rotary-percent": _get_rotary_percent,
    "--rotary-interleaved": lambda s: any(rope.interleaved for rope in s.ropes),
    "--rotary-scaling-factor": _get_rope(lambda r: r.factor),
    "--rope-scaling-factor": _get_rope(lambda r: r.factor),
    "--use-rope-scaling": lambda s: any(rope.kind == "llama3" for rope in s.ropes),
    "--rope-type": _get_rope(lambda r: "yarn" if r.kind == "yarn" else "rope"),
    "--original-max-position-embeddings": lambda s: s.get_rope_key("original_max_position_embeddings"),
    "--beta-fast": lambda s: s.get_rope_key("beta_fast"),
    "--beta-slow": lambda s: s.get_rope_key("beta_slow"),
    "--mscale": lambda s: s.get_rope_key("mscale"),
    "--mscale-all-dim": lambda s: s.get_rope_key("mscale_all_dim"),
    # multi-head latent attention
    "--multi-latent-attention": lambda s: s.mla is not None,
    "--q-lora-rank": _get_mla(lambda m: m.query_rank),
    "--kv-lora-rank": _get_mla(lambda m: m.kv_rank),
    "--qk-head-dim": _get_mla(lambda m: m.nope_dim),
    "--qk-pos-emb-head-dim": _get_mla(lambda m: m.rope_dim),
    "--v-head-dim": _get_mla(lambda m: m.value_dim),
    # experts
    "--num-experts": lambda s: 0 if s.moe is None else s.moe.num_experts,
    "--moe-router-topk": _get_moe(lambda m: m.experts_per_token),
    "--moe-ffn-hidden-size": _get_moe(lambda m: m.size),
    "--moe-layer-freq": _get_layer_freq,
    "--moe-shared-expert-intermediate-size": _get_moe(lambda m: 0 if m.shared is None else m.shared.size),
    "--moe-shared-expert-gate": _get_moe(lambda m: m.shared_gate),
    "--moe-router-score-function": _get_moe(lambda m: m.score),
    "--moe-router-pre-softmax": _get_moe(lambda m: m.score == "sigmoid" or not m.norm_topk_prob),
    "--moe-router-enable-expert-bias": _get_moe(lambda m: m.correction),
    "--moe-router-num-groups": _get_moe(lambda m: m.groups),
    "--moe-router-group-topk": _get_moe(lambda m: m.kept_groups),
    "--moe-router-topk-scaling-factor": _get_moe(lambda m: m.scale),
    "--moe-latent-size": _get_moe(lambda m: m.latent),
}
