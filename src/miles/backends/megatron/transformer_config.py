"""Megatron's TransformerConfig built from a decoder spec."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional as F

from miles.backends.megatron.module_choice import (
    ACTIVATIONS,
    AdaptedPart,
    ModuleChoice,
    can_use_transformer_engine,
    choose_modules,
)
from miles.backends.megatron.router import RouterBalance, split_balance
from miles.backends.megatron.supported_models import (
    check_batch_invariant_support,
    check_megatron_support,
    check_quantization_support,
    holds_packed_weights,
)
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST, Numerics
from miles.models.quantization import MEGATRON_RECIPES
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MlpSpec, MoeSpec


@dataclass
class DecoderTransformerConfig(MLATransformerConfig):
    """Megatron's config plus what our modules need: the spec, the device of parameters, whether layers are Transformer
    Engine's, the numerics of all layers, the load balancing of routers, for which Megatron's own is off, and the parts
    with adapters that Megatron's modules cannot have.
    """

    decoder_spec: DecoderSpec = field(kw_only=True)
    param_device: torch.device = field(kw_only=True)
    transformer_engine: bool = field(default=False, kw_only=True)
    numerics: Numerics = field(default=FAST, kw_only=True)
    balance: RouterBalance = field(default_factory=RouterBalance, kw_only=True)
    adapted: frozenset[AdaptedPart] = field(default=frozenset(), kw_only=True)

    @property
    def has_packed_weights(self) -> bool:
        """Whether some weights are packed."""
        return holds_packed_weights(self.decoder_spec)

    @property
    def modules(self) -> ModuleChoice:
        """Which modules are Megatron's, and which the decoder's."""
        return choose_modules(self.decoder_spec, self.adapted)


def build_transformer_config(
    spec: DecoderSpec,
    layout: ParallelDims,
    flags: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    transformer_engine: bool = True,
    numerics: Numerics = FAST,
    adapted: frozenset[AdaptedPart] = frozenset(),
) -> DecoderTransformerConfig:
    """Build the config for ``spec``; ``flags`` are fields of Megatron's own. Its errors become UsageErrors.

    Transformer Engine is used where it is installed, unless ``transformer_engine`` is false or the ``numerics`` are
    batch-invariant.
    """
    problem = _find_problem(spec, layout, flags, numerics, adapted)
    if problem is not None:
        raise UsageError(problem)
    transformer_engine = transformer_engine and not numerics.batch_invariant
    balance, flags = split_balance(flags)
    _check_balance(balance, spec)
    transformer_engine = transformer_engine and can_use_transformer_engine(spec) and not holds_packed_weights(spec)
    transformer_engine = transformer_engine and device.type == "cuda" and find_spec("transformer_engine") is not None
    fields = {
        **_decoder(spec, layout),
        **_moe(spec, transformer_engine=transformer_engine),
        **_parallel(layout, device, interleaved=flags.get("virtual_pipeline_model_parallel_size") is not None),
        **_precision(dtype),
        **_quantization(spec, transformer_engine=transformer_engine),
        "calculate_per_token_loss": True,  # the schedules then do not scale the loss
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Fusions of other packages, or of kernels that our attention replaces.
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        **flags,
    }
    try:
        tf_config = DecoderTransformerConfig(
            **fields,
            decoder_spec=spec,
            param_device=device,
            transformer_engine=transformer_engine,
            numerics=numerics,
            balance=balance,
            adapted=adapted,
        )
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"Megatron-Core rejects this model and parallel layout: {error}") from error
    conflict = find_router_conflict(tf_config)
    if balance.counts_tokens and conflict is not None:
        raise UsageError(f"load balancing of routers cannot be combined with --megatron-{conflict}: leave one out.")
    return tf_config


def _find_problem(
    spec: DecoderSpec,
    layout: ParallelDims,
    flags: Mapping[str, Any],
    numerics: Numerics,
    adapted: frozenset[AdaptedPart],
) -> str | None:
    """Return why this model cannot be trained so (a sentence), or None if it can."""
    problem = check_megatron_support(spec, layout, adapted) or check_quantization_support(spec, layout)
    if problem is None and numerics.batch_invariant:
        problem = check_batch_invariant_support(spec, layout) or _find_numeric_flag(flags)
    if problem is None and not choose_modules(spec).is_all_megatron:
        problem = _find_kernel_flag(flags, f"layers of {spec.family} do not")
    elif problem is None and adapted:
        problem = _find_kernel_flag(flags, "modules with such adapters do not")
    return problem


def _check_balance(balance: RouterBalance, spec: DecoderSpec) -> None:
    """Raise an error if the model has no routers to balance as asked."""
    if spec.moe is None and (balance.counts_tokens or balance.frozen):
        raise UsageError(f"{spec.family} has no routers to balance or freeze; remove the --megatron-moe-router flags.")
    if balance.bias_rate and not any(isinstance(x.ffn, MoeSpec) and x.ffn.correction for x in spec.layers):
        raise UsageError(
            f"--megatron-moe-router-bias-update-rate updates the correction bias of routers, which {spec.family} does "
            "not have; remove it."
        )


# Fields that move or recompute activations, or lay out pipeline stages, and change no result.
_EXACT_FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_EXACT_FIELDS += ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_EXACT_FIELDS += ("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm")
_EXACT_FIELDS += ("deallocate_pipeline_outputs", "distribute_saved_activations")
# Modules whose recomputation batch-invariant layers follow.
_EXACT_RECOMPUTE = ("core_attn", "mlp")


def _find_numeric_flag(flags: Mapping[str, Any]) -> str | None:
    """Return why a flag of Megatron's does not work with batch-invariant layers, or None."""
    return _find_kernel_flag(flags, "--parity exact does not")


def _find_kernel_flag(flags: Mapping[str, Any], who: str) -> str | None:
    """Return a sentence about the first flag that concerns Megatron's own kernels, or None."""
    _, flags = split_balance(flags)
    name = next((name for name in flags if name not in _EXACT_FIELDS), None)
    if name is not None:
        return f"--megatron-{name.replace('_', '-')} is about Megatron's own kernels, which {who} use; remove it."
    module = next((m for m in flags.get("recompute_modules") or () if m not in _EXACT_RECOMPUTE), None)
    if module is None:
        return None
    return f"{who} work with --megatron-recompute-modules {module}; use {', '.join(_EXACT_RECOMPUTE)}."


def find_router_conflict(tf_config: DecoderTransformerConfig) -> str | None:
    """Return the flag with which a micro-batch's own settings do not reach every router, or None."""
    again = tf_config.recompute_granularity == "selective" and "moe" in (tf_config.recompute_modules or ())
    return "moe-router-fusion" if tf_config.moe_router_fusion else "recompute-modules moe" if again else None


def _decoder(spec: DecoderSpec, layout: ParallelDims) -> dict[str, Any]:
    mlp = _mlp(spec)
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": mlp.size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[mlp.activation],
        **_attention(choose_modules(spec).attention, layout),
    }


def _attention(mixer: AttentionSpec | MlaSpec | None, layout: ParallelDims) -> dict[str, Any]:
    if mixer is None:  # no layer reads these
        heads = {"num_attention_heads": layout.tensor, "num_query_groups": layout.tensor, "kv_channels": 1}
        return {"multi_latent_attention": False, "add_bias_linear": False, "qk_layernorm": False, **heads}
    if isinstance(mixer, MlaSpec):
        return {
            "multi_latent_attention": True,
            "num_attention_heads": mixer.num_heads,
            "num_query_groups": mixer.num_heads,
            "kv_channels": mixer.value_dim,
            "q_lora_rank": mixer.query_rank,
            "kv_lora_rank": mixer.kv_rank,
            "qk_head_dim": mixer.nope_dim,
            "qk_pos_emb_head_dim": mixer.rope_dim,
            "v_head_dim": mixer.value_dim,
            "rope_type": "rope",  # replaced by ours
            "rotary_scaling_factor": 1.0,
            "add_bias_linear": False,
            "qk_layernorm": True,
        }
    return {
        "multi_latent_attention": False,
        "num_attention_heads": mixer.num_heads,
        "num_query_groups": mixer.num_kv_heads,
        "kv_channels": mixer.head_dim,
        "add_bias_linear": mixer.output_bias,
        "add_qkv_bias": mixer.qkv_bias and not mixer.output_bias,
        "qk_layernorm": mixer.qk_norm == "head",
    }


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dict(
    zip(ACTIVATIONS, (F.silu, _gelu_tanh), strict=True)
)


def _moe(spec: DecoderSpec, *, transformer_engine: bool) -> dict[str, Any]:
    moe = choose_modules(spec).moe
    if spec.moe is None:
        return {}
    out: dict[str, Any] = {
        "num_moe_experts": spec.moe.num_experts,
        "moe_router_topk": spec.moe.experts_per_token,
        "moe_ffn_hidden_size": spec.moe.size,
        "moe_layer_freq": [int(isinstance(layer.ffn, MoeSpec)) for layer in spec.layers],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if moe is None:
        return out | {"moe_router_pre_softmax": True}  # which Megatron requires with one expert per token
    out |= {
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.size,
        "moe_router_score_function": moe.score,
        # Normalized weights equal a softmax over the selected experts.
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if moe.scale == 1.0 else moe.scale,
        "moe_router_enable_expert_bias": moe.correction,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32" if moe.wide_router or moe.score == "sigmoid" else None,
        "moe_grouped_gemm": transformer_engine,
    }
    if moe.groups > 1:
        out |= {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.kept_groups}
    if moe.shared is not None:
        out |= {"moe_shared_expert_intermediate_size": moe.shared.size, "moe_shared_expert_gate": moe.shared_gate}
    return out


def _parallel(layout: ParallelDims, device: torch.device, *, interleaved: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
        "sequence_parallel": layout.sequence,
        # Packed micro-batches vary in length, which only this dispatcher supports.
        "variable_seq_lengths": layout.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": True,
    }
    if device.type == "cpu" and interleaved:
        # Over gloo the batched sends of interleaved stages are reordered and give wrong results.
        out |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return out


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def _quantization(spec: DecoderSpec, *, transformer_engine: bool) -> dict[str, Any]:
    """Transformer Engine's FP8, if the spec is quantized in the forward."""
    quantization = spec.quantization
    if quantization is None or quantization.packed:
        return {}
    name = quantization.format.name
    if not transformer_engine:
        raise UsageError(
            f"--train-precision {name} with --train-backend megatron needs Transformer Engine on a GPU; install it, or "
            "use --train-backend fsdp."
        )
    keeps = quantization.layers_at_start + quantization.layers_at_end > 0
    return {
        "fp8": "hybrid" if quantization.backward == "hybrid" else "e4m3",
        "fp8_recipe": MEGATRON_RECIPES[name],
        "first_last_layers_bf16": keeps,
        "num_layers_at_start_in_bf16": quantization.layers_at_start,
        "num_layers_at_end_in_bf16": quantization.layers_at_end,
        # FP8 GEMMs need row counts that are multiples of 16.
        **({} if spec.moe is None else {"moe_router_padding_for_quantization": True}),
    }


def _mlp(spec: DecoderSpec) -> MlpSpec:
    """Return the MLP of Megatron's dense layers; without any, one like its experts."""
    modules = choose_modules(spec)
    if modules.mlp is not None:
        return modules.mlp
    if modules.moe is not None:
        return MlpSpec(size=modules.moe.size, activation=modules.moe.activation)
    sizes = [layer.ffn.size for layer in spec.layers if layer.ffn is not None]
    return MlpSpec(size=sizes[0])
