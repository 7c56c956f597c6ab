"""Megatron-Core's own flags: names and types are its TransformerConfig's, so that its next release brings its own.

What the checkpoint, the layout or Miles itself decides cannot be given, and says where it comes from.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer.transformer_config import MLATransformerConfig

from miles.core.errors import UsageError

PREFIX = "--megatron-"
DEALT = "use_distributed_optimizer"
"""The one flag that is no field: Megatron keeps it with its optimizer."""

# What others call a field.
_ALIASES: Mapping[str, str] = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}

_CHECKPOINT = "follows from config.json of the checkpoint"
_OURS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "gated_linear_unit"),
            *("activation_func", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "softmax_scale"),
            *("attention_output_gate", "window_size", "window_attn_skip_freq", "softmax_type", "rotary_interleaved"),
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_router_num_groups"),
            *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
            *("moe_router_group_topk", "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size"),
            *("moe_shared_expert_gate", "moe_latent_size", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
            *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent"),
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
            *("mscale_all_dim", "no_rope_freq", "mtp_num_layers"),
        ),
        _CHECKPOINT,
    ),
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
        ),
        "follows from the layout of the ranks; leave out the megatron- of the flag",
    ),
    **dict.fromkeys(
        ("params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "enable_autocast"), "follows from --dtype"
    ),
    **dict.fromkeys(
        ("calculate_per_token_loss", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"),
        "is decided by Miles: a step's loss is its objective and nothing else",
    ),
    **dict.fromkeys(
        ("variable_seq_lengths", "perform_initialization", "use_cpu_initialization", "finalize_model_grads_func"),
        "is decided by Miles, which packs sequences, fills weights and sums gradients itself",
    ),
    **dict.fromkeys(
        ("moe_enable_routing_replay",),
        "is decided by Miles: --use-rollout-routing-replay replays the engine's experts, --use-routing-replay its own",
    ),
}


@lru_cache(maxsize=1)
def _hints() -> Mapping[str, Any]:
    hints = get_type_hints(MLATransformerConfig)
    return {f.name: hints[f.name] for f in fields(MLATransformerConfig)} | {DEALT: bool}


def read(words: Sequence[str]) -> dict[str, Any]:
    """The fields that flags such as ``("--recompute-granularity", "full")`` set; all complaints at once."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for flag, values in _chunks(words):
        name = flag.replace("-", "_")
        name = _ALIASES.get(name, name)
        negated = name not in _hints() and name.startswith("no_") and name[3:] in _hints()
        name = name[3:] if negated else name
        problem = _refusal(flag, name)
        if problem is None:
            try:
                found[name] = False if negated and not values else _value(_hints()[name], values)
            except ValueError as error:
                problem = f"{PREFIX}{flag} {' '.join(values)}".rstrip() + f": {error}."
        if problem is not None:
            problems.append(problem)
    if problems:
        raise UsageError(problems)
    return found


def _chunks(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    out: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            out.append((flag, [value] if equals else []))
        elif out:
            out[-1][1].append(word)
        else:
            raise UsageError(f"{word} follows no flag of Megatron's.")
    return out


def _refusal(flag: str, name: str) -> str | None:
    if name in _OURS:
        return f"{PREFIX}{flag} {_OURS[name]}."
    if name in _hints():
        return None
    near = get_close_matches(name, [n for n in _hints() if n not in _OURS], n=1)
    hint = f"; did you mean {PREFIX}{near[0].replace('_', '-')}?" if near else "."
    return f"{PREFIX}{flag} is no field of Megatron-Core's TransformerConfig{hint}"


def _value(hint: Any, words: list[str]) -> Any:
    """What the words mean as a value of that type; a ValueError says what was expected."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _any_of([kind for kind in get_args(hint) if kind is not type(None)], words, hint)
    if origin is list or hint is list:
        inner = next(iter(get_args(hint)), str)
        return [_value(inner, [word]) for word in words]
    if hint is bool:
        told = {"true": True, "false": False}.get(" ".join(words).lower() or "true")
        if told is None:
            raise ValueError("expected true, false or nothing")
        return told
    if len(words) != 1:
        raise ValueError(f"expected one value, not {len(words)}")
    if origin is Literal:
        if words[0] not in get_args(hint):
            raise ValueError(f"expected one of {', '.join(map(str, get_args(hint)))}")
        return words[0]
    if hint in (int, float, str):
        return hint(words[0])
    raise ValueError("what it wants cannot be given on a command line")


def _any_of(kinds: Sequence[Any], words: list[str], hint: Any) -> Any:
    """The first kind that the words are; text last, which anything is."""
    plain = [k for k in kinds if k is not str] + [k for k in kinds if k is str]
    if len(words) == 1:
        plain.sort(key=lambda k: get_origin(k) is list or k is list)
    problem: ValueError | None = None
    for kind in plain:
        try:
            return _value(kind, words)
        except ValueError as error:
            problem = error
    raise problem or ValueError(f"{hint} cannot be given on a command line")
