"""Qwen4-Exp, the text model: Gated DeltaNet and sparse attention, gated hyper-connections and n-gram embeddings.

Three layers of Gated DeltaNet are followed by one of attention, whose indexer selects pools of tokens (QSA). Experts
and the vision tower are those of Qwen3.5; the tower is not computed here, so RoPE is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import isqrt
from typing import Any

from miles.models.families import qwen3_next
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import read_text_config
from miles.models.residual_spec import GatedResidualSpec, NgramSpec
from miles.models.spec import AttentionSpec, DecoderSpec, GatedDeltaNetSpec, LayerSpec, PoolIndexerSpec

# transformers' defaults for a config that does not name them.
_TEXT = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "hc_count": 4,
    "hc_lowrank": 320,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 512,
}
_LINEAR = "linear_attention"
# What published configs and transformers call sparse attention.
_FULL, _SPARSE = "full_attention", "qwen_sparse_attention"
_INDEXER_KEYS = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")

_HYPER_NAMES = {"attention_hyper": "attn_hyper_connection", "mlp_hyper": "mlp_hyper_connection"}
_NAMES = {"shared": "shared_expert", **_HYPER_NAMES, "hyper_head": "model.hyper_connection_mixer"}
_PREFIX = "model.language_model"

# SplitMix64: the sequence that the multipliers of the hash come from.
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# What the seed is increased by from one layer with n-gram embeddings to the next.
_SEED_STEP = 10007


def read_text(config: Mapping[str, Any], *, family: str = "qwen4_exp_text") -> DecoderSpec:
    """The config of the text model alone."""
    reader = ConfigReader(_rename_layers({**_TEXT, **config}), family)
    common = reader.common_args()
    attention, delta, kinds = _read_mixers(reader)
    moe = qwen3_next.read_experts(reader, norm_topk_prob=reader.flag("norm_topk_prob", True))
    hyper = GatedResidualSpec(streams=reader.positive_int("hc_count"), rank=reader.positive_int("hc_lowrank"))
    if hyper.streams == 1:
        reader.reject("hc_count", "is 1, but hyper-connections join at least 2 residual streams")
    ngrams = _read_ngrams(reader, kinds, common["vocab_size"])
    layers = (
        LayerSpec(mixer=delta if kind == _LINEAR else attention, ffn=moe, hyper=hyper, ngram=ngrams.get(i))
        for i, kind in enumerate(kinds)
    )
    return reader.build_spec(common, layers, norm_offset=1.0)


def read_wrapped(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model of a config with a vision tower; the tower is not computed here."""
    text = read_text_config(config, _TEXT, family="qwen4_exp")
    # N-grams end at the token that the text model's own config names.
    own = config["text_config"].get("eos_token_id")
    return read_text(text if own is None else {**text, "eos_token_id": own}, family="qwen4_exp")


def _rename_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Call sparse attention what published configs call it."""
    kinds = config.get("layer_types")
    return config if kinds is None else {**config, "layer_types": [_FULL if k == _SPARSE else k for k in kinds]}


def _read_mixers(reader: ConfigReader) -> tuple[AttentionSpec, GatedDeltaNetSpec, Sequence[str]]:
    attention, delta, kinds = qwen3_next.read_mixer_kinds(reader, fused=False, partial=1.0)
    gate = reader.config.get("output_gate_type") or reader.config.get("hidden_act") or "silu"
    if gate not in ("silu", "sigmoid"):
        reader.reject("output_gate_type", f"is {gate!r}, but only silu or sigmoid is implemented")
        gate = "silu"
    if _FULL in kinds:
        attention = replace(attention, indexer=_read_indexer(reader, attention))
    return attention, replace(delta, output_gate=gate), kinds


def _read_indexer(reader: ConfigReader, attention: AttentionSpec) -> PoolIndexerSpec:
    heads, kv_heads, head_dim, budget, pool = (reader.positive_int(key) for key in _INDEXER_KEYS)
    if kv_heads != 1:
        reader.reject("indexer_kv_heads", f"is {kv_heads}, but the indexer has one key of a token")
    if budget % pool:
        reader.reject("indexer_budget", f"is {budget}, which is no multiple of the {pool} of indexer_compress_ratio")
        pool = 1
    assert attention.rope is not None
    rotated = attention.rope.dim or attention.head_dim
    if rotated > head_dim and not reader.problems:
        reader.reject("indexer_head_dim", f"is {head_dim}, less than the {rotated} channels that RoPE rotates")
    return PoolIndexerSpec(num_heads=heads, head_dim=head_dim, top=budget, pool=pool)


def _read_ngrams(reader: ConfigReader, kinds: Sequence[str], vocab_size: int) -> dict[int, NgramSpec]:
    """Read the n-gram embeddings of each layer that has some, by its number."""
    numbers = reader.config.get("ple_layer_ids") or ()
    if not isinstance(numbers, list | tuple) or not all(type(n) is int and 1 <= n <= len(kinds) for n in numbers):
        reader.reject("ple_layer_ids", f"is {numbers!r}, but must be a list of numbers from 1 to {len(kinds)}")
        return {}
    for number in numbers:
        if kinds[number - 1] != _LINEAR:
            reader.reject("ple_layer_ids", f"has {number}, which is no layer of linear attention")
    ends = reader.eos_token_ids()
    if numbers and not ends:
        reader.reject("eos_token_id", "is missing, and n-grams end at it")
    order, heads = reader.positive_int("ngram_size"), reader.positive_int("heads_per_ngram")
    dim = reader.positive_int("ple_embed_dim", reader.positive_int("hidden_size"))
    if numbers and order == 1:
        reader.reject("ngram_size", "is 1, but n-grams have at least 2 tokens")
    total = heads * (order - 1)
    if numbers and order > 1 and dim % total:
        reader.reject("ple_embed_dim", f"is {dim}, which is no multiple of the {total} n-gram heads")
    base, seed = reader.positive_int("ngram_vocab_size_base"), reader.layer_index("seed", 1234)
    divisor, shards = (reader.positive_int(key) for key in ("make_ngram_vocab_size_divisible_by", "split_ngram_parts"))
    kernel = reader.positive_int("ple_conv_kernel_size")
    if reader.problems:
        return {}
    found: dict[int, NgramSpec] = {}
    for i, number in enumerate(sorted(set(numbers))):
        sizes = list_primes(base, total * (i + 1))[total * i :]
        found[number - 1] = NgramSpec(
            dim=dim,
            order=order,
            kernel=kernel,
            head_sizes=sizes,
            multipliers=list_multipliers(vocab_size, order, seed + _SEED_STEP * i),
            rows=-(-sum(sizes) // divisor) * divisor,
            end_token_id=ends[0],
            shards=shards,
        )
    return found


@lru_cache(maxsize=16)
def list_primes(base: int, count: int) -> tuple[int, ...]:
    """List the first primes from ``base`` on.

    >>> list_primes(20, 3)
    (23, 29, 31)
    """
    found: list[int] = []
    number = max(base, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def list_multipliers(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    """List the odd multipliers of the tokens of an n-gram; their products with tokens fit into 64 bits."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    return tuple(2 * (_mix(seed + _GAMMA * (i + 1)) % half) + 1 for i in range(count))


def _mix(state: int) -> int:
    """Return a number of the SplitMix64 sequence."""
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * _FACTORS[0]) & _MASK
    state = ((state ^ (state >> 27)) * _FACTORS[1]) & _MASK
    return state ^ (state >> 31)


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers and the vision tower."""
    return hf_name.startswith(("model.visual.", "mtp."))


FAMILIES = (
    ModelFamily(
        model_type="qwen4_exp_text",
        architectures=("Qwen4ExpForCausalLM",),
        models="Qwen4-Exp, the text model alone",
        read=read_text,
        names=_NAMES,
        is_unused=_is_unused,
    ),
    ModelFamily(
        model_type="qwen4_exp",
        architectures=("Qwen4ExpForConditionalGeneration",),
        models="Qwen4-Exp (Qwen3.8-Flash-Next), text only",
        read=read_wrapped,
        names={
            **_NAMES,
            "embedding": f"{_PREFIX}.embed_tokens",
            "layer": f"{_PREFIX}.layers.{{}}",
            "hyper_head": f"{_PREFIX}.hyper_connection_mixer",
        },
        is_unused=_is_unused,
    ),
)
