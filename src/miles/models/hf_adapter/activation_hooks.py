"""Activation capture of transformers' own module, under the operation names of the decoder.

Modules are found by the checkpoint's tensor names, which both share; operations without a module of their own are not
recorded.

Shapes: T tokens; H heads, d channels of one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from miles.models.activation_hooks import ActivationTrace, record_experts
from miles.models.checkpoint.param_map import build_param_map
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec

_EAGER = "eager_attention_forward"


@contextmanager
def capture_hf_activations(module: nn.Module, spec: DecoderSpec, trace: ActivationTrace) -> Iterator[None]:
    """Record every forward of ``module`` (one sequence, eager attention) in ``trace``."""
    paths = {
        param: list(dict.fromkeys(p.hf_name.rpartition(".")[0] for p in sorted(slices, key=lambda p: p.start)))
        for param, slices in build_param_map(spec).items()
    }
    recorder = _Recorder(module, paths, trace)
    recorder.record_output("norm.weight", spec.num_layers, "final norm", divisor=spec.output_divisor)
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}"
        recorder.record_layer(
            f"{prefix}.attention_norm.weight" if layer.mixer is not None else f"{prefix}.mlp_norm.weight", index
        )
        recorder.record_output(f"{prefix}.attention_norm.weight", index, "norm")
        if isinstance(layer.mixer, AttentionSpec):
            recorder.record_output(f"{prefix}.attention.qkv.weight", index, "qkv")
            recorder.record_input(f"{prefix}.attention.output.weight", index, "attention")
            recorder.record_output(f"{prefix}.attention.output.weight", index, "output")
            recorder.record_attention(f"{prefix}.attention.output.weight", index)
        if isinstance(layer.mixer, MlaSpec):
            recorder.record_input(f"{prefix}.mla.output.weight", index, "attention")
            recorder.record_output(f"{prefix}.mla.output.weight", index, "output")
        recorder.record_output(f"{prefix}.mlp_norm.weight", index, "mlp norm")
        if isinstance(layer.ffn, MoeSpec):
            recorder.record_router(f"{prefix}.moe.router.weight", index)
            recorder.record_ffn(f"{prefix}.moe.router.weight", index)
        elif layer.ffn is not None:
            recorder.record_ffn(f"{prefix}.mlp.down.weight", index)
    try:
        yield
    finally:
        recorder.close()


class _Recorder:
    def __init__(self, module: nn.Module, paths: dict[str, list[str]], trace: ActivationTrace) -> None:
        self._modules = dict(module.named_modules())
        self._paths = paths
        self._trace = trace
        self._hooks: list[Any] = []
        self._restores: list[Callable[[], None]] = []
        self._layer_by_module: dict[int, int] = {}
        self._patched: set[str] = set()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for restore in self._restores:
            restore()

    def _find_modules(self, param: str) -> list[nn.Module]:
        """The modules whose weights make up the parameter; empty if any tensor has no module of its own."""
        names = self._paths.get(param, [])
        return [self._modules[name] for name in names] if all(name in self._modules for name in names) else []

    def record_output(self, param: str, layer: int, operation: str, *, divisor: float = 1.0) -> None:
        """Record the outputs of these modules, concatenated; the decoder has them divided by ``divisor``."""
        modules, pending = self._find_modules(param), dict[int, Tensor]()

        def hook(number: int, out: Any) -> None:
            pending[number] = _rows(out) if divisor == 1 else _rows(out) / divisor
            if len(pending) == len(modules):
                self._trace.record(layer, operation, torch.cat([pending[n] for n in range(len(modules))], -1))
                pending.clear()

        for number, module in enumerate(modules):
            self._hooks.append(module.register_forward_hook(lambda m, a, out, n=number: hook(n, out)))

    def record_input(self, param: str, layer: int, operation: str) -> None:
        record = self._trace.record
        for module in self._find_modules(param)[:1]:
            self._hooks.append(
                module.register_forward_pre_hook(lambda m, args: record(layer, operation, _rows(args[0])))
            )

    def _find_parent(self, param: str) -> nn.Module | None:
        names = self._paths.get(param, [])
        return self._modules.get(names[0].rpartition(".")[0]) if names else None

    def record_ffn(self, param: str, layer: int) -> None:
        """Record the output of the feed-forward part as a whole."""
        parent, record = self._find_parent(param), self._trace.record
        if parent is not None:
            self._hooks.append(parent.register_forward_hook(lambda m, a, out: record(layer, "mlp", _rows(out))))

    def record_layer(self, param: str, index: int) -> None:
        """Record the output of a layer, and the input of the first."""
        parent, record = self._find_parent(param), self._trace.record
        if parent is None:
            return
        if index == 0:
            self._hooks.append(
                parent.register_forward_pre_hook(lambda m, args: record(-1, "embedding", _rows(args[0])))
            )
        self._hooks.append(parent.register_forward_hook(lambda m, a, out: record(index, "residual", _rows(out))))

    def record_router(self, param: str, layer: int) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            outputs: list[Tensor] = [out] if isinstance(out, Tensor) else list(out)
            # Llama 4's router returns the scores of the chosen experts, then the logits of all.
            has_scores = len(outputs) == 2 and outputs[1].is_floating_point() and outputs[0].shape == outputs[1].shape
            self._trace.record(layer, "router", _rows(outputs[1 if has_scores else 0]))
            if len(outputs) == 3 and not outputs[2].is_floating_point() and outputs[1].shape == outputs[2].shape:
                record_experts(self._trace, layer, outputs[2], outputs[1])

        for module in self._find_modules(param)[:1]:
            self._hooks.append(module.register_forward_hook(hook))

    def record_attention(self, param: str, layer: int) -> None:
        """Record queries and keys as transformers' eager attention receives them."""
        parent = self._find_parent(param)
        if parent is None:
            return
        self._layer_by_module[id(parent)] = layer
        modeling = sys.modules[type(parent).__module__]
        if modeling.__name__ in self._patched or not hasattr(modeling, _EAGER):
            return
        self._patched.add(modeling.__name__)
        original = getattr(modeling, _EAGER)

        def traced_attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(module) in self._layer_by_module:
                both_THd = torch.cat((query[0], key[0])).transpose(0, 1)
                self._trace.record(self._layer_by_module[id(module)], "rotation", both_THd)
            return original(module, query, key, *args, **kwargs)

        setattr(modeling, _EAGER, traced_attention)
        self._restores.append(lambda: setattr(modeling, _EAGER, original))


def _rows(out: Any) -> Tensor:
    """Flatten the batch dimension of the one sequence, and several residual streams into the values of a token."""
    values: Tensor = out if isinstance(out, Tensor) else out[0]
    if values.ndim == 4:  # streams behind the tokens, or before the batch
        streams_TnD = values[0] if values.shape[0] == 1 else values[:, 0].transpose(0, 1)
        return streams_TnD.flatten(1)
    return values.flatten(0, 1) if values.ndim == 3 else values
