"""What every operation of Megatron's layers gave, under the names of ours (see ``models.taps``).

Of one rank, which has all layers and all channels. What another package has fused into one operation is not told.

Shapes: ``t`` slots, T tokens, 1 the batch that Megatron wants, G key-value heads, n query heads of one and its key and
value, d channels of a head, E experts, k of them a token.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.megatron.modules import Norm, Trunk
from miles.models.spec import AttentionSpec, DecoderSpec, MoeSpec
from miles.models.taps import Trace, chosen, watching


@contextmanager
def tapped_megatron(trunk: Trunk, spec: DecoderSpec, trace: Trace) -> Iterator[None]:
    """Let every forward of ``trunk``, which has all layers, leave what it does in ``trace``."""
    decoder: Any = trunk.decoder
    hooks = [trunk.register_forward_pre_hook(_watched(trace), with_kwargs=True)]
    hooks.append(trunk.get_submodule("embedding").register_forward_hook(_given(trace, -1, "embedding")))
    hooks.append(decoder.final_layernorm.register_forward_hook(_given(trace, spec.num_layers, "final norm")))
    patched: list[nn.Module] = []
    for index, layer in enumerate(decoder.layers):
        hooks += _on_layer(layer, spec, index, trace)
        if isinstance(spec.layers[index].ffn, MoeSpec):
            router = layer.mlp.router
            router.gating = _scored(router.gating, index, trace)
            patched.append(router)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for router in patched:
            del router.gating  # the class's own comes back


def _on_layer(layer: Any, spec: DecoderSpec, index: int, trace: Trace) -> list[Any]:
    mixer, attention = spec.layers[index].mixer, layer.self_attention
    hooks: list[Any] = [layer.register_forward_hook(_given(trace, index, "residual"))]
    for norm, operation in ((layer.input_layernorm, "norm"), (layer.pre_mlp_layernorm, "mlp norm")):
        if isinstance(norm, Norm):  # Transformer Engine's projections have it inside
            hooks.append(norm.register_forward_hook(_given(trace, index, operation)))
    if isinstance(mixer, AttentionSpec):
        hooks.append(attention.linear_qkv.register_forward_hook(_apart(trace, index, mixer)))
    hooks.append(attention.linear_proj.register_forward_pre_hook(_taken(trace, index, "attention")))
    hooks.append(attention.linear_proj.register_forward_hook(_given(trace, index, "output", bias=True)))
    hooks.append(layer.mlp.register_forward_hook(_given(trace, index, "mlp", bias=True)))
    if isinstance(spec.layers[index].ffn, MoeSpec):
        hooks.append(layer.mlp.router.register_forward_hook(_routed(trace, index)))
    return hooks


def _rows(x: Tensor) -> Tensor:
    """What there is of each slot, without the batch that Megatron wants."""
    return x.flatten(0, 1) if x.ndim == 3 else x


def _given(trace: Trace, layer: int, operation: str, *, bias: bool = False) -> Callable[..., None]:
    """What a module gives; of those that leave their ``bias`` to the next, with it."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        told: Tensor = out if isinstance(out, Tensor) else out[0]
        late = out[1] if bias and not isinstance(out, Tensor) else None
        trace.keep(layer, operation, _rows(told) if late is None else _rows(told) + late)

    return hook


def _taken(trace: Trace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        trace.keep(layer, operation, _rows(args[0]))

    return hook


def _apart(trace: Trace, layer: int, spec: AttentionSpec) -> Callable[..., None]:
    """Queries, keys and values one after the other: Megatron has them by groups that share a key."""

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        each = spec.num_heads // spec.num_kv_heads
        both_tGnd = _rows(out[0]).unflatten(-1, (spec.num_kv_heads, each + 2, -1))
        parts = both_tGnd.split((each, 1, 1), dim=2)
        trace.keep(layer, "qkv", torch.cat([part.flatten(1) for part in parts], -1))

    return hook


def _scored(gating: Callable[[Tensor], Tensor], layer: int, trace: Trace) -> Callable[[Tensor], Tensor]:
    def scored(x: Tensor) -> Tensor:
        scores = gating(x)
        trace.keep(layer, "router", _rows(scores))
        return scores

    return scored


def _routed(trace: Trace, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> None:
        gates_tE, used_tE = out
        experts_tk = used_tE.nonzero()[:, 1].view(len(used_tE), -1)
        chosen(trace, layer, experts_tk, gates_tE.gather(-1, experts_tk))

    return hook


def _watched(trace: Trace) -> Callable[..., Any]:
    """Queries and keys as attention is given them: they know their places by then."""

    def hook(module: nn.Module, args: Any, how: dict[str, Any]) -> Any:
        packed = how["packed_seq_params"]
        return args, how | {"packed_seq_params": replace(packed, attend=watching(packed.attend, trace))}

    return hook
