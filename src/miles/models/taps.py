"""What every operation of a forward gave, by layer and name: for holding two programs of one model side by side.

Shapes: T tokens, and whatever an operation has of each; H query heads, G key-value heads, d and e channels of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles.models.decoder import Decoder, Layer
from miles.models.memory import Attend

OPERATIONS = (
    *("embedding", "norm", "qkv", "rotation", "attention", "output", "mlp norm", "router", "experts", "gates", "mlp"),
    *("residual", "final norm", "logits", "log-probs"),
)
"""In the order in which a layer does them; the last three come after all layers."""
CHOICES = "experts"
"""The operation that gives numbers of experts, ascending, which are alike or not."""
Place = tuple[int, str]
"""A layer and an operation. The embedding is layer -1, what follows the last layer is the number of layers."""


class Trace:
    """What operations gave, joined over the steps of a forward that was made in several."""

    def __init__(self) -> None:
        self._found: dict[Place, list[Tensor]] = {}

    def keep(self, layer: int, operation: str, given: Tensor) -> None:
        """Remember the values of some tokens, which come in order; axes behind the first are one."""
        assert operation in OPERATIONS, operation
        self._found.setdefault((layer, operation), []).append(given.detach().flatten(1).to("cpu", copy=True))

    def whole(self) -> dict[Place, Tensor]:
        """Every operation's values [T, n], in the order of a forward."""
        order = sorted(self._found, key=lambda place: (place[0], OPERATIONS.index(place[1])))
        return {place: torch.cat(self._found[place]) for place in order}


@contextmanager
def tapped(decoder: Decoder, trace: Trace) -> Iterator[None]:
    """Let every forward of ``decoder`` leave what it does in ``trace``; queries and keys are ``watching``'s to tell."""
    hooks: list[Any] = [decoder.register_forward_hook(_given(trace, decoder.spec.num_layers, "final norm"))]
    patched: list[tuple[nn.Module, str]] = []
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        hooks += _on_layer(layer, index, trace)
        _replace(layer, "pending", _streamed(layer.pending, index, trace), patched)
        if layer.moe is not None:
            _replace(layer.moe, "route", _routed(layer.moe.route, index, trace), patched)
            if layer.moe.spec.score != "softmax" or layer.moe.spec.wide_router:  # then it is no module that scores
                _replace(layer.moe, "_choose", _scored(layer.moe._choose, index, trace), patched)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name in patched:
            delattr(module, name)  # the class's own comes back


def _on_layer(layer: Layer, index: int, trace: Trace) -> list[Any]:
    """Hooks on the parts of a layer that are modules called as such."""
    hooks: list[Any] = []
    mixers = [layer.get_submodule(name) for name in ("attention", "mla", "delta", "mamba") if hasattr(layer, name)]
    for mixer in mixers:
        hooks += (mixer.register_forward_pre_hook(_taken(trace, index, "norm")),)
        hooks += (mixer.register_forward_hook(_given(trace, index, "output")),)
    if hasattr(layer, "attention"):
        inner = layer.get_submodule("attention")
        hooks.append(inner.get_submodule("qkv").register_forward_hook(_given(trace, index, "qkv")))
        hooks.append(inner.get_submodule("output").register_forward_pre_hook(_taken(trace, index, "attention")))
    if hasattr(layer, "mla"):
        inner = layer.get_submodule("mla.output")
        hooks.append(inner.register_forward_pre_hook(_taken(trace, index, "attention")))
    after = layer.mlp if layer.moe is None else layer.moe
    if after is not None:
        hooks.append(after.register_forward_pre_hook(_taken(trace, index, "mlp norm")))
        hooks.append(after.register_forward_hook(_given(trace, index, "mlp")))
    if layer.moe is not None:
        hooks.append(layer.moe.router.register_forward_hook(_given(trace, index, "router")))
    return hooks


def _given(trace: Trace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        trace.keep(layer, operation, out)

    return hook


def _taken(trace: Trace, layer: int, operation: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        trace.keep(layer, operation, args[0])

    return hook


def _replace(module: nn.Module, name: str, by: Callable[..., Any], patched: list[tuple[nn.Module, str]]) -> None:
    """Stand in for a method of this one module."""
    setattr(module, name, by)
    patched.append((module, name))


def _streamed(pending: Callable[..., Any], index: int, trace: Trace) -> Callable[..., Any]:
    """The residual stream, which no module gives: it is in two parts until the next norm joins them."""

    def streamed(x_TD: Tensor, late_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
        if index == 0:
            trace.keep(-1, "embedding", x_TD)
        x_TD, late_TD = pending(x_TD, late_TD, *rest)
        trace.keep(index, "residual", x_TD if late_TD is None else x_TD + late_TD)
        return x_TD, late_TD

    return streamed


def _scored(choose: Callable[..., Tensor], index: int, trace: Trace) -> Callable[..., Tensor]:
    def scored(logits_TE: Tensor, *rest: Any, **how: Any) -> Tensor:
        trace.keep(index, "router", logits_TE)
        return choose(logits_TE, *rest, **how)

    return scored


def _routed(route: Callable[..., tuple[Tensor, Tensor]], index: int, trace: Trace) -> Callable[..., Any]:
    def routed(*given: Any) -> tuple[Tensor, Tensor]:
        weights_Tk, experts_Tk = route(*given)
        chosen(trace, index, experts_Tk, weights_Tk)
        return weights_Tk, experts_Tk

    return routed


def chosen(trace: Trace, layer: int, experts_Tk: Tensor, weights_Tk: Tensor) -> None:
    """Keep experts in one order, whichever a program finds them in."""
    ascending_Tk, order_Tk = experts_Tk.detach().sort(-1)
    trace.keep(layer, CHOICES, ascending_Tk)
    trace.keep(layer, "gates", weights_Tk.detach().gather(-1, order_Tk))


def watching(attend: Attend, trace: Trace) -> Attend:
    """``attend`` itself, but for telling which queries and keys it was given: they know their places by then."""
    kind: Any = type(attend)

    def called(self: Any, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGe: Tensor, *rest: Any, **how: Any) -> Tensor:
        trace.keep(layer, "rotation", torch.cat((q_THd, k_TGd), 1) if _alike(q_THd, k_TGd) else q_THd)
        return kind.__call__(self, layer, q_THd, k_TGd, v_TGe, *rest, **how)

    # Of the same class for whoever asks: fused paths of a card look at it.
    made = object.__new__(type(kind.__name__, (kind,), {"__call__": called}))
    made.__dict__.update(vars(attend))
    return made


def _alike(q_THd: Tensor, k_TGd: Tensor) -> bool:
    return q_THd.ndim == k_TGd.ndim == 3 and q_THd.shape[-1] == k_TGd.shape[-1]


def common(a: Mapping[Place, Tensor], b: Mapping[Place, Tensor]) -> list[Place]:
    """The places both programs tell of, in the order of a forward, and in the same shape."""
    return [place for place in a if place in b and a[place].shape == b[place].shape]
