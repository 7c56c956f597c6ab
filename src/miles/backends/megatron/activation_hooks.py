"""Activation capture of Megatron's layers, under the operation names of the decoder.

For one rank that has all layers and all channels. Operations that another package has fused are not recorded.

Shapes: ``t`` slots, T tokens, 1 Megatron's batch dimension, G key-value heads, n query heads of one plus its key and
value, d channels of a head, E experts, k of them per token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.megatron.decoder_modules import DecoderMixer, DecoderMoe
from miles.backends.megatron.layer_spec import GPTBackbone, MegatronRMSNorm
from miles.models.activation_hooks import ActivationTrace, patch_router, record_experts, trace_attention
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec


@contextmanager
def capture_megatron_activations(backbone: GPTBackbone, spec: DecoderSpec, trace: ActivationTrace) -> Iterator[None]:
    """Record every forward of ``backbone``, which has all layers, in ``trace``."""
    decoder: Any = backbone.decoder
    hooks = [backbone.register_forward_pre_hook(_trace_backend(trace), with_kwargs=True)]
    hooks.append(backbone.get_submodule("embedding").register_forward_hook(_record_output(trace, -1, "embedding")))
    hooks.append(decoder.final_layernorm.register_forward_hook(_record_output(trace, spec.num_layers, "final norm")))
    patched: list[tuple[nn.Module, str]] = []
    for index, layer in enumerate(decoder.layers):
        hooks += _hook_layer(layer, spec, index, trace)
        if isinstance(layer.mlp, DecoderMoe):
            patch_router(layer.mlp.moe_mlp, index, trace, patched)
        elif isinstance(spec.layers[index].ffn, MoeSpec):
            router = layer.mlp.router
            router.gating = _record_scores(router.gating, index, trace)
            patched.append((router, "gating"))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name in patched:
            delattr(module, name)  # restores the method of the class


def _hook_layer(layer: Any, spec: DecoderSpec, index: int, trace: ActivationTrace) -> list[Any]:
    mixer, attention = spec.layers[index].mixer, layer.self_attention
    hooks: list[Any] = [layer.register_forward_hook(_record_output(trace, index, "residual"))]
    for norm, operation in ((layer.input_layernorm, "norm"), (layer.pre_mlp_layernorm, "mlp norm")):
        if isinstance(norm, MegatronRMSNorm):  # Transformer Engine fuses it into the projection
            hooks.append(norm.register_forward_hook(_record_output(trace, index, operation)))
    if mixer is not None:
        hooks += _hook_attention(attention, mixer, index, trace)
    if spec.layers[index].ffn is None:
        return hooks
    beside = isinstance(layer.mlp, DecoderMoe) and layer.mlp.mlp_norm is not None
    if beside:  # two branches of the residual stream, which the decoder has no operation for
        hooks.append(layer.mlp.moe_mlp.router.register_forward_hook(_record_output(trace, index, "router")))
        return hooks
    hooks.append(layer.mlp.register_forward_hook(_record_output(trace, index, "mlp", bias=True)))
    if isinstance(layer.mlp, DecoderMoe):
        hooks.append(layer.mlp.moe_mlp.router.register_forward_hook(_record_output(trace, index, "router")))
    elif isinstance(spec.layers[index].ffn, MoeSpec):
        hooks.append(layer.mlp.router.register_forward_hook(_record_routing(trace, index)))
    return hooks


def _hook_attention(attention: Any, mixer: object, index: int, trace: ActivationTrace) -> list[Any]:
    if isinstance(attention, DecoderMixer):
        own: Any = attention.get_submodule(attention.mixer)
        hooks = [attention.register_forward_hook(_record_output(trace, index, "output"))]
        if isinstance(mixer, AttentionSpec | MlaSpec):
            hooks.append(own.output.register_forward_pre_hook(_record_input(trace, index, "attention")))
        if isinstance(mixer, AttentionSpec):
            hooks.append(own.qkv.register_forward_hook(_record_output(trace, index, "qkv")))
        return hooks
    hooks = [attention.linear_proj.register_forward_pre_hook(_record_input(trace, index, "attention"))]
    hooks.append(attention.linear_proj.register_forward_hook(_record_output(trace, index, "output", bias=True)))
    if isinstance(mixer, AttentionSpec):
        hooks.append(attention.linear_qkv.register_forward_hook(_record_qkv(trace, index, mixer)))
    return hooks


def _rows(x: Tensor) -> Tensor:
    """Remove Megatron's batch dimension, unless it holds several residual streams."""
    return x.squeeze(1) if x.ndim == 3 else x


def _record_output(trace: ActivationTrace, layer: int, operation: str, *, bias: bool = False) -> Callable[..., None]:
    """Record a module's output; with ``bias``, add the bias that Megatron returns separately."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        values: Tensor = out if isinstance(out, Tensor) else out[0]
        separate_bias = out[1] if bias and not isinstance(out, Tensor) else None
        trace.record(layer, operation, _rows(values) if separate_bias is None else _rows(values) + separate_bias)

    return hook


def _record_input(trace: ActivationTrace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        trace.record(layer, operation, _rows(args[0]))

    return hook


def _record_qkv(trace: ActivationTrace, layer: int, spec: AttentionSpec) -> Callable[..., None]:
    """Record queries, keys and values one after the other: Megatron groups them by key-value head."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        each = spec.num_heads // spec.num_kv_heads
        both_tGnd = _rows(out[0]).unflatten(-1, (spec.num_kv_heads, each + 2, -1))
        parts = both_tGnd.split((each, 1, 1), dim=2)
        trace.record(layer, "qkv", torch.cat([part.flatten(1) for part in parts], -1))

    return hook


def _record_scores(
    gating: Callable[[Tensor], Tensor], layer: int, trace: ActivationTrace
) -> Callable[[Tensor], Tensor]:
    def traced_gating(x: Tensor) -> Tensor:
        scores = gating(x)
        trace.record(layer, "router", _rows(scores))
        return scores

    return traced_gating


def _record_routing(trace: ActivationTrace, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> None:
        if out[1].dtype != torch.bool:  # batch-invariant: by choice
            record_experts(trace, layer, out[1], out[0])
            return
        gates_tE, used_tE = out
        experts_tk = used_tE.nonzero()[:, 1].view(len(used_tE), -1)
        record_experts(trace, layer, experts_tk, gates_tE.gather(-1, experts_tk))

    return hook


def _trace_backend(trace: ActivationTrace) -> Callable[..., Any]:
    """Record queries and keys as the attention backend receives them, after RoPE."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        packed = kwargs["packed_seq_params"]
        return args, kwargs | {
            "packed_seq_params": replace(packed, attn_backend=trace_attention(packed.attn_backend, trace))
        }

    return hook
