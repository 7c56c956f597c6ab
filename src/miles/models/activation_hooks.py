"""Activation capture: the output of every operation of a forward, by layer and name, to compare two implementations.

Shapes: T tokens and the values of one operation; H query heads, G key-value heads, d and e channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.attention.params import AttentionInputs
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.moe import MoeMlp

OPERATIONS = (
    "embedding",
    "norm",
    "qkv",
    "rotation",
    "attention",
    "output",
    "mlp norm",
    "router",
    "experts",
    "gates",
    "mlp",
    "residual",
    "final norm",
    "logits",
    "log-probs",
)
"""In the order in which a layer computes them; the last three come after all layers."""
EXPERTS_OPERATION = "experts"
"""The operation whose values are expert indices, ascending, which are equal or not."""
ActivationKey = tuple[int, str]
"""A layer and an operation. The embedding is layer -1; what follows the last layer has the number of layers."""


class ActivationTrace:
    """The values of operations, concatenated over the steps of a forward that was computed in several."""

    def __init__(self) -> None:
        self._recorded: dict[ActivationKey, list[Tensor]] = {}

    def record(self, layer: int, operation: str, values: Tensor) -> None:
        """Record the values of the next tokens; dimensions after the first are flattened."""
        assert operation in OPERATIONS, operation
        self._recorded.setdefault((layer, operation), []).append(values.detach().flatten(1).to("cpu", copy=True))

    def concatenate(self) -> dict[ActivationKey, Tensor]:
        """Return every operation's values [T, n], in the order of a forward."""
        keys = sorted(self._recorded, key=lambda key: (key[0], OPERATIONS.index(key[1])))
        return {key: torch.cat(self._recorded[key]) for key in keys}


@contextmanager
def capture_activations(decoder: Decoder, trace: ActivationTrace) -> Iterator[None]:
    """Record every forward of ``decoder`` in ``trace``; queries and keys are recorded by ``trace_attention``."""
    hooks: list[Any] = [decoder.register_forward_hook(_record_output(trace, decoder.spec.num_layers, "final norm"))]
    patched: list[tuple[nn.Module, str]] = []
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        hooks += _hook_layer(layer, index, trace)
        _patch(layer, "forward_deferred", _record_residual(layer.forward_deferred, index, trace), patched)
        if layer.moe is not None:
            patch_router(layer.moe, index, trace, patched)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name in patched:
            delattr(module, name)  # restores the method of the class


def patch_router(moe: MoeMlp, index: int, trace: ActivationTrace, patched: list[tuple[nn.Module, str]]) -> None:
    """Record the routing of every forward of ``moe``; of its replaced methods, which are appended to ``patched``,
    ``delattr`` restores those of the class.
    """
    _patch(moe, "route", _record_routing(moe.route, index, trace), patched)
    if moe.spec.score != "softmax" or moe.spec.wide_router:  # the router module is not called
        _patch(moe, "_select_experts", _record_scores(moe._select_experts, index, trace), patched)


def _hook_layer(layer: DecoderLayer, index: int, trace: ActivationTrace) -> list[Any]:
    """Hook the parts of a layer that are called as modules."""
    hooks: list[Any] = []
    for name in ("attention", "mla", "delta", "kda", "mamba", "short_conv"):
        if hasattr(layer, name):
            mixer = layer.get_submodule(name)
            hooks.append(mixer.register_forward_pre_hook(_record_input(trace, index, "norm")))
            hooks.append(mixer.register_forward_hook(_record_output(trace, index, "output")))
    if hasattr(layer, "attention"):
        attention = layer.get_submodule("attention")
        hooks.append(attention.get_submodule("qkv").register_forward_hook(_record_output(trace, index, "qkv")))
        projection = attention.get_submodule("output")
        hooks.append(projection.register_forward_pre_hook(_record_input(trace, index, "attention")))
    if hasattr(layer, "mla"):
        projection = layer.get_submodule("mla.output")
        hooks.append(projection.register_forward_pre_hook(_record_input(trace, index, "attention")))
    ffn = layer.mlp if layer.moe is None else layer.moe
    if ffn is not None:
        hooks.append(ffn.register_forward_pre_hook(_record_input(trace, index, "mlp norm")))
        hooks.append(ffn.register_forward_hook(_record_output(trace, index, "mlp")))
    if layer.moe is not None:
        hooks.append(layer.moe.router.register_forward_hook(_record_output(trace, index, "router")))
    return hooks


def _record_output(trace: ActivationTrace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        trace.record(layer, operation, out)

    return hook


def _record_input(trace: ActivationTrace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        trace.record(layer, operation, args[0])

    return hook


def _patch(module: nn.Module, name: str, method: Callable[..., Any], patched: list[tuple[nn.Module, str]]) -> None:
    """Replace a method of this one instance."""
    setattr(module, name, method)
    patched.append((module, name))


def _record_residual(forward: Callable[..., Any], index: int, trace: ActivationTrace) -> Callable[..., Any]:
    """Record the residual stream, which no module returns: the next norm adds its two parts."""

    def run(x_TD: Tensor, deferred_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
        if index == 0:
            trace.record(-1, "embedding", x_TD)
        x_TD, deferred_TD = forward(x_TD, deferred_TD, *rest)
        trace.record(index, "residual", x_TD if deferred_TD is None else x_TD + deferred_TD)
        return x_TD, deferred_TD

    return run


def _record_scores(select: Callable[..., Tensor], index: int, trace: ActivationTrace) -> Callable[..., Tensor]:
    def run(logits_TE: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trace.record(index, "router", logits_TE)
        return select(logits_TE, *args, **kwargs)

    return run


def _record_routing(
    route: Callable[..., tuple[Tensor, Tensor]], index: int, trace: ActivationTrace
) -> Callable[..., Any]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        weights_Tk, experts_Tk = route(*args)
        record_experts(trace, index, experts_Tk, weights_Tk)
        return weights_Tk, experts_Tk

    return run


def record_experts(trace: ActivationTrace, layer: int, experts_Tk: Tensor, weights_Tk: Tensor) -> None:
    """Record routed experts in ascending order, so that implementations with another order compare equal."""
    ascending_Tk, permutation_Tk = experts_Tk.detach().sort(-1)
    trace.record(layer, EXPERTS_OPERATION, ascending_Tk)
    trace.record(layer, "gates", weights_Tk.detach().gather(-1, permutation_Tk))


def trace_attention(attn_backend: AttentionBackend, trace: ActivationTrace) -> AttentionBackend:
    """Return a copy of ``attn_backend`` that also records the queries and keys it receives, after RoPE."""
    backend_class: Any = type(attn_backend)

    def call(self: Any, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd = inputs.q_THd, inputs.k_TGd
        trace.record(layer, "rotation", torch.cat((q_THd, k_TGd), 1) if _same_heads(q_THd, k_TGd) else q_THd)
        return backend_class.__call__(self, layer, inputs)

    # A subclass, since fused GPU paths check the class.
    traced = object.__new__(type(backend_class.__name__, (backend_class,), {"__call__": call}))
    traced.__dict__.update(vars(attn_backend))
    return traced


def _same_heads(q_THd: Tensor, k_TGd: Tensor) -> bool:
    return q_THd.ndim == k_TGd.ndim == 3 and q_THd.shape[-1] == k_TGd.shape[-1]


def common_keys(a: Mapping[ActivationKey, Tensor], b: Mapping[ActivationKey, Tensor]) -> list[ActivationKey]:
    """List the keys that both traces have with the same shape, in the order of a forward."""
    return [key for key in a if key in b and a[key].shape == b[key].shape]
