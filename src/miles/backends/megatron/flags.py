"""Megatron-Core's own flags: names and types are those of its TransformerConfig, so that new releases work as they are.

Fields that follow from the checkpoint, the parallel layout or Miles itself cannot be set; the error says where they
come from.
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

from miles.backends.megatron.router import FREEZE_GATE
from miles.core.errors import UsageError

PREFIX = "--megatron-"
DISTRIBUTED_OPTIMIZER = "use_distributed_optimizer"
"""A flag that is not a field of the config: it belongs to Megatron's optimizer."""

# Other names of a field.
_ALIASES: Mapping[str, str] = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}


def _reserve(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_RESERVED: Mapping[str, str] = {
    **_reserve(
        """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization
        layernorm_epsilon layernorm_zero_centered_gamma gated_linear_unit activation_func add_bias_linear add_qkv_bias
        qk_layernorm qk_l2_norm softmax_scale attention_output_gate window_size window_attn_skip_freq softmax_type
        rotary_interleaved num_moe_experts moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_router_num_groups
        moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_group_topk
        moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size
        multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type
        rotary_base rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale
        mscale_all_dim no_rope_freq mtp_num_layers
        """,
        "follows from config.json of the checkpoint",
    ),
    **_reserve(
        """
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size sequence_parallel
        """,
        "follows from the parallel layout; use the flag without its megatron- prefix",
    ),
    **_reserve("params_dtype pipeline_dtype bf16 fp16 autocast_dtype enable_autocast", "follows from --dtype"),
    **_reserve("calculate_per_token_loss", "is set by Miles: gradients are sums, whose weights are in the loss"),
    **_reserve(
        "variable_seq_lengths perform_initialization use_cpu_initialization finalize_model_grads_func",
        "is set by Miles, which packs sequences, loads weights and reduces gradients itself",
    ),
    **_reserve(
        "moe_enable_routing_replay",
        "is set by Miles: --use-rollout-routing-replay replays the engine's experts, --use-routing-replay its own",
    ),
}


@lru_cache(maxsize=1)
def _hints() -> Mapping[str, Any]:
    hints = get_type_hints(MLATransformerConfig)
    return {f.name: hints[f.name] for f in fields(MLATransformerConfig)} | {
        DISTRIBUTED_OPTIMIZER: bool,
        FREEZE_GATE: bool,
    }


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Parse flags such as ``("--recompute-granularity", "full")`` into config fields; reports all problems at once."""
    fields_: dict[str, Any] = {}
    problems: list[str] = []
    for flag, values in _group_by_flag(words):
        name = flag.replace("-", "_")
        name = _ALIASES.get(name, name)
        negated = name not in _hints() and name.startswith("no_") and name[3:] in _hints()
        name = name[3:] if negated else name
        problem = _find_problem(flag, name)
        if problem is None:
            try:
                fields_[name] = False if negated and not values else _value(_hints()[name], values)
            except ValueError as error:
                problem = f"{PREFIX}{flag} {' '.join(values)}".rstrip() + f": {error}."
        if problem is not None:
            problems.append(problem)
    if problems:
        raise UsageError(problems)
    return fields_


def _group_by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    out: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            out.append((flag, [value] if equals else []))
        elif out:
            out[-1][1].append(word)
        else:
            raise UsageError(f"{word} does not follow a --megatron- flag.")
    return out


def _find_problem(flag: str, name: str) -> str | None:
    if name in _RESERVED:
        return f"{PREFIX}{flag} {_RESERVED[name]}."
    if name in _hints():
        return None
    near = get_close_matches(name, [n for n in _hints() if n not in _RESERVED], n=1)
    hint = f"; did you mean {PREFIX}{near[0].replace('_', '-')}?" if near else "."
    return f"{PREFIX}{flag} is not a field of Megatron-Core's TransformerConfig{hint}"


def _value(hint: Any, words: list[str]) -> Any:
    """Parse the words as a value of that type; a ValueError says what was expected."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _parse_union([kind for kind in get_args(hint) if kind is not type(None)], words, hint)
    if origin is list or hint is list:
        inner = next(iter(get_args(hint)), str)
        return [_value(inner, [word]) for word in words]
    if hint is bool:
        value = {"true": True, "false": False}.get(" ".join(words).lower() or "true")
        if value is None:
            raise ValueError("expected true, false or nothing")
        return value
    if len(words) != 1:
        raise ValueError(f"expected one value, not {len(words)}")
    if origin is Literal:
        if words[0] not in get_args(hint):
            raise ValueError(f"expected one of {', '.join(map(str, get_args(hint)))}")
        return words[0]
    if hint in (int, float, str):
        return hint(words[0])
    raise ValueError("its type cannot be given on a command line")


def _parse_union(kinds: Sequence[Any], words: list[str], hint: Any) -> Any:
    """Return the value of the first type that the words match; text last, which matches anything."""
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
