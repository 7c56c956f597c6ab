"""What every operation of transformers' own module gave, under the names of ours (see ``models.taps``).

Its modules are found by the checkpoint's tensors, which both share: what has no module of its own is not told.

Shapes: T tokens; H heads, d channels of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles.models.names import pieces
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec
from miles.models.taps import Trace, chosen

_EAGER = "eager_attention_forward"


@contextmanager
def tapped_foreign(module: nn.Module, spec: DecoderSpec, trace: Trace) -> Iterator[None]:
    """Let every forward of ``module``, of one sequence and eager, leave what it does in ``trace``."""
    paths = {
        ours: list(dict.fromkeys(p.hf_name.rpartition(".")[0] for p in sorted(parts, key=lambda p: p.start)))
        for ours, parts in pieces(spec).items()
    }
    taps = _Taps(module, paths, trace)
    taps.given("norm.weight", spec.num_layers, "final norm")
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}"
        taps.layer(f"{at}.attention_norm.weight" if layer.mixer is not None else f"{at}.mlp_norm.weight", index)
        taps.given(f"{at}.attention_norm.weight", index, "norm")
        if isinstance(layer.mixer, AttentionSpec):
            taps.given(f"{at}.attention.qkv.weight", index, "qkv")
            taps.taken(f"{at}.attention.output.weight", index, "attention")
            taps.given(f"{at}.attention.output.weight", index, "output")
            taps.attention(f"{at}.attention.output.weight", index)
        if isinstance(layer.mixer, MlaSpec):
            taps.taken(f"{at}.mla.output.weight", index, "attention")
            taps.given(f"{at}.mla.output.weight", index, "output")
        taps.given(f"{at}.mlp_norm.weight", index, "mlp norm")
        if isinstance(layer.ffn, MoeSpec):
            taps.router(f"{at}.moe.router.weight", index)
            taps.parent(f"{at}.moe.router.weight", index)
        elif layer.ffn is not None:
            taps.parent(f"{at}.mlp.down.weight", index)
    try:
        yield
    finally:
        taps.close()


class _Taps:
    def __init__(self, module: nn.Module, paths: dict[str, list[str]], trace: Trace) -> None:
        self._modules, self._paths, self._trace = dict(module.named_modules()), paths, trace
        self._hooks: list[Any] = []
        self._restored: list[Callable[[], None]] = []
        self._layer_of: dict[int, int] = {}
        self._patched: set[str] = set()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for restore in self._restored:
            restore()

    def _found(self, ours: str) -> list[nn.Module]:
        """The modules whose weights ours is made of; none where any has no module of its own."""
        names = self._paths.get(ours, [])
        return [self._modules[name] for name in names] if all(name in self._modules for name in names) else []

    def given(self, ours: str, layer: int, operation: str) -> None:
        """What these modules give, side by side."""
        modules, waiting = self._found(ours), dict[int, Tensor]()

        def hook(number: int, out: Any) -> None:
            waiting[number] = _rows(out)
            if len(waiting) == len(modules):
                self._trace.keep(layer, operation, torch.cat([waiting[n] for n in range(len(modules))], -1))
                waiting.clear()

        for number, module in enumerate(modules):
            self._hooks.append(module.register_forward_hook(lambda m, a, out, n=number: hook(n, out)))

    def taken(self, ours: str, layer: int, operation: str) -> None:
        keep = self._trace.keep
        for module in self._found(ours)[:1]:
            self._hooks.append(module.register_forward_pre_hook(lambda m, args: keep(layer, operation, _rows(args[0]))))

    def _above(self, ours: str) -> nn.Module | None:
        names = self._paths.get(ours, [])
        return self._modules.get(names[0].rpartition(".")[0]) if names else None

    def parent(self, ours: str, layer: int) -> None:
        """The feed-forward part as a whole."""
        above, keep = self._above(ours), self._trace.keep
        if above is not None:
            self._hooks.append(above.register_forward_hook(lambda m, a, out: keep(layer, "mlp", _rows(out))))

    def layer(self, ours: str, index: int) -> None:
        """The layer itself: what goes in at the first, and what comes out of each."""
        above, keep = self._above(ours), self._trace.keep
        if above is None:
            return
        if index == 0:
            self._hooks.append(above.register_forward_pre_hook(lambda m, args: keep(-1, "embedding", _rows(args[0]))))
        self._hooks.append(above.register_forward_hook(lambda m, a, out: keep(index, "residual", _rows(out))))

    def router(self, ours: str, layer: int) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            told: list[Tensor] = [out] if isinstance(out, Tensor) else list(out)
            self._trace.keep(layer, "router", _rows(told[0]))
            if len(told) == 3 and not told[2].is_floating_point() and told[1].shape == told[2].shape:
                chosen(self._trace, layer, told[2], told[1])

        for module in self._found(ours)[:1]:
            self._hooks.append(module.register_forward_hook(hook))

    def attention(self, ours: str, layer: int) -> None:
        """Queries and keys as its eager attention is given them."""
        above = self._above(ours)
        if above is None:
            return
        self._layer_of[id(above)] = layer
        home = sys.modules[type(above).__module__]
        if home.__name__ in self._patched or not hasattr(home, _EAGER):
            return
        self._patched.add(home.__name__)
        plain = getattr(home, _EAGER)

        def watched(module: nn.Module, query: Tensor, key: Tensor, *rest: Any, **how: Any) -> Any:
            if id(module) in self._layer_of:
                both_THd = torch.cat((query[0], key[0])).transpose(0, 1)
                self._trace.keep(self._layer_of[id(module)], "rotation", both_THd)
            return plain(module, query, key, *rest, **how)

        setattr(home, _EAGER, watched)
        self._restored.append(lambda: setattr(home, _EAGER, plain))


def _rows(out: Any) -> Tensor:
    """What there is of each token of the one sequence."""
    told: Tensor = out if isinstance(out, Tensor) else out[0]
    return told.flatten(0, 1) if told.ndim == 3 else told
