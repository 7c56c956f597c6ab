"""What an unknown architecture would take, read off its config: mechanisms this decoder has, and ones it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ACTIVATIONS = frozenset({"silu", "swish", "gelu_pytorch_tanh", "gelu_tanh", "relu2"})
_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "moe", "mlp"})


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism, the key of the config that asks for it, and whether the decoder has it."""

    name: str
    key: str
    have: bool


# Keys that ask for a mechanism when they are there and not null, false, zero, empty or a factor of one.
_KEYS: tuple[tuple[str, str, bool], ...] = (
    ("kv_lora_rank", "latent attention", True),
    ("index_topk", "a sparse-attention indexer", True),
    ("linear_num_key_heads", "a gated delta network", True),
    ("mamba_num_heads", "Mamba-2", True),
    ("sliding_window", "sliding windows", True),
    ("attention_chunk_size", "attention in chunks", True),
    ("attn_logit_softcapping", "bounded attention scores", True),
    ("final_logit_softcapping", "bounded logits", True),
    ("partial_rotary_factor", "rotation of part of a head", True),
    ("num_experts", "a mixture of experts", True),
    ("num_local_experts", "a mixture of experts", True),
    ("n_routed_experts", "a mixture of experts", True),
    ("n_shared_experts", "shared experts", True),
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
    ("hidden_size_per_layer_input", "embeddings of each layer", False),
    ("num_kv_shared_layers", "layers that share keys and values", False),
    ("mamba_d_state", "a Mamba layer beside or inside attention", False),
    ("conv_L_cache", "short convolutions as mixers", False),
    ("rwkv_hidden_size", "RWKV's recurrence", False),
    ("alibi", "positions as a slope of the scores (ALiBi)", False),
    ("use_alibi", "positions as a slope of the scores (ALiBi)", False),
    ("n_positions", "learned absolute positions", False),
    ("parallel_attn", "attention and MLP side by side", False),
    ("use_parallel_residual", "attention and MLP side by side", False),
    ("vision_config", "images (text alone is trained here)", False),
    ("audio_config", "sound (text alone is trained here)", False),
)


def mechanisms(config: Mapping[str, Any]) -> Iterator[Mechanism]:
    """What the config asks for, as far as its keys tell; a family file is still to be written."""
    inner = config.get("text_config")
    whole = {**config, **inner} if isinstance(inner, Mapping) else config
    seen: set[str] = set()
    for key, name, have in _KEYS:
        value = whole.get(key)
        neutral = isinstance(value, float) and value == 1.0  # a factor that changes nothing
        if value and not neutral and name not in seen:
            seen.add(name)
            yield Mechanism(name, key, have)
    for key in ("hidden_act", "hidden_activation", "mlp_hidden_act"):
        if (act := whole.get(key)) is not None:
            yield Mechanism(f"the activation {act}", key, act in _ACTIVATIONS)
    for kind in sorted(set(whole.get("layer_types") or ()) - _LAYERS):
        yield Mechanism(f"layers of kind {kind}", "layer_types", have=False)
