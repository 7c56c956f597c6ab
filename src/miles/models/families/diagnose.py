"""Diagnosis of an unknown architecture from its config: mechanisms that this decoder supports, and ones it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ACTIVATIONS = frozenset({"silu", "swish", "gelu_pytorch_tanh", "gelu_tanh", "relu2"})
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "moe", "mlp"})
_LAYERS |= {"hybrid", "hybrid_sliding", "compressed_sparse_attention", "heavily_compressed_attention"}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism, the config key that requests it, and whether the decoder supports it."""

    name: str
    key: str
    supported: bool


# Keys that request a mechanism unless they are absent, null, false, zero, empty or a factor of one.
_KEYS: tuple[tuple[str, str, bool], ...] = (
    ("kv_lora_rank", "multi-head latent attention (MLA)", True),
    ("index_topk", "a sparse-attention indexer", True),
    ("index_kpool", "an indexer of pools of tokens", True),
    ("compress_rates", "compressed keys and values beside a window (CSA, HCA)", True),
    ("compress_ratios", "compressed keys and values beside a window (CSA, HCA)", True),
    ("d_rel", "a relative position bias of attention scores", True),
    ("sconv_kernel_size", "short convolutions beside attention", True),
    ("o_groups", "an output projection in groups of heads", True),
    ("hc_mult", "hyper-connections", True),
    ("hc_lowrank", "gated hyper-connections", True),
    ("ple_layer_ids", "n-gram embeddings", True),
    ("indexer_compress_ratio", "an indexer of pools of tokens", True),
    ("linear_num_key_heads", "Gated DeltaNet", True),
    ("mamba_num_heads", "Mamba-2", True),
    ("sliding_window", "sliding windows", True),
    ("attention_chunk_size", "chunked attention", True),
    ("attn_logit_softcapping", "soft-capped attention scores", True),
    ("final_logit_softcapping", "soft-capped logits", True),
    ("partial_rotary_factor", "partial rotary embedding", True),
    ("num_experts", "a mixture of experts", True),
    ("num_local_experts", "a mixture of experts", True),
    ("n_routed_experts", "a mixture of experts", True),
    ("n_shared_experts", "shared experts", True),
    ("num_hash_layers", "experts selected by the token's id (hash routing)", True),
    ("is_encoder_decoder", "an encoder beside the decoder", False),
    ("residual_multiplier", "a scaled residual stream", False),
    ("logits_scaling", "scaled logits", False),
    ("logit_scale", "scaled logits", False),
    ("attention_multiplier", "an attention scale of its own", True),
    ("embedding_multiplier", "scaled embeddings", True),
    ("layer_norm_eps", "LayerNorm in place of RMSNorm", False),
    ("layer_norm_epsilon", "LayerNorm in place of RMSNorm", False),
    ("layernorm_epsilon", "LayerNorm in place of RMSNorm", False),
    ("altup_num_inputs", "several residual streams (AltUp)", False),
    ("laurel_rank", "learned low-rank residuals (LAuReL)", False),
    ("hidden_size_per_layer_input", "per-layer embeddings", False),
    ("num_kv_shared_layers", "KV cache shared between layers", False),
    ("mamba_d_state", "a Mamba layer beside or inside attention", False),
    ("conv_L_cache", "short convolutions as mixers", True),
    ("rwkv_hidden_size", "RWKV's recurrence", False),
    ("alibi", "ALiBi positions", False),
    ("use_alibi", "ALiBi positions", False),
    ("n_positions", "learned absolute positions", False),
    ("parallel_attn", "parallel attention and MLP", False),
    ("use_parallel_residual", "parallel attention and MLP", False),
    ("vision_config", "a vision tower of its own", False),
    ("audio_config", "audio (only text is trained here)", False),
)


def list_mechanisms(config: Mapping[str, Any]) -> Iterator[Mechanism]:
    """List what the config requests, as far as its keys show; a family module is still to be written."""
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, Mapping) else config
    seen: set[str] = set()
    for key, name, supported in _KEYS:
        value = merged.get(key)
        neutral = isinstance(value, float) and value == 1.0  # a factor that changes nothing
        if value and not neutral and name not in seen:
            seen.add(name)
            yield Mechanism(name, key, supported)
    for key in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
        if (act := merged.get(key)) is not None:
            yield Mechanism(f"the activation {act}", key, act in _ACTIVATIONS)
    score = merged.get("scoring_func")
    if score is not None:
        yield Mechanism(f"a router with {score} scores", "scoring_func", score in _SCORES)
    if "hash_moe" in (merged.get("mlp_layer_types") or ()) and "num_hash_layers" not in merged:
        name = "experts selected by the token's id (hash routing)"
        yield Mechanism(name, "mlp_layer_types", supported=True)
    for kind in sorted(set(merged.get("layer_types") or ()) - _LAYERS):
        yield Mechanism(f"layers of kind {kind}", "layer_types", supported=False)
