"""Reader of SGLang's debug tensor dumps: activations of stock SGLang under our names (``models.activation_hooks``).

A server started with ``FLAG`` and a folder writes the outputs of its modules in every step to a file there. Modules are
identified by their checkpoint tensors; operations without a module of their own, or in a shared one, are not read.

Shapes: T tokens of a step, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from miles.core.errors import EngineError
from miles.core.types import Tokens
from miles.models.activation_hooks import ActivationTrace, record_experts
from miles.models.checkpoint.param_map import build_param_map
from miles.models.spec import AttentionSpec, DecoderSpec, MoeSpec

FLAG = "--debug-tensor-dump-output-folder"
Dump = Mapping[str, "Tensor | list[Tensor]"]
_INPUT_IDS = "model.forward_batch_info.input_ids"
_POSITIONS = "model.forward_batch_info.positions"


def list_steps(folder: Path) -> list[Path]:
    """The dumped steps so far, in order."""
    return sorted(folder.rglob("Pass*.pt"))


def read_dumps(steps: Sequence[Path], spec: DecoderSpec, sequences: Sequence[Tokens], trace: ActivationTrace) -> None:
    """Record the activations of ``sequences``, which were requested one after the other, in ``trace``."""
    modules = _modules_by_param(spec)
    remaining = iter(steps)
    for tokens in sequences:
        done = 0
        while done < len(tokens):
            path = next(remaining, None)
            if path is None:
                raise EngineError(f"SGLang dumped {done} of {len(tokens)} tokens; is its context long enough?")
            dump: Dump = torch.load(path, map_location="cpu", weights_only=True)
            count = _count_matching(dump, tokens, done)
            if count:
                _record_step(dump, spec, modules, trace)
            done += count


def _count_matching(dump: Dump, tokens: Tokens, done: int) -> int:
    """How many of ``tokens`` from ``done`` on a step computed; 0 for a step of another request."""
    ids, positions = dump.get(_INPUT_IDS), dump.get(_POSITIONS)
    if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
        return 0
    expected = list(range(done, done + len(ids)))
    if positions.tolist() != expected or expected[-1] >= len(tokens):
        return 0
    return len(ids) if ids.tolist() == [int(tokens[i]) for i in expected] else 0


def _modules_by_param(spec: DecoderSpec) -> dict[str, list[str]]:
    """The SGLang modules of each of our parameters."""
    return {
        ours: list(dict.fromkeys(p.hf_name.rpartition(".")[0] for p in sorted(parts, key=lambda p: p.start)))
        for ours, parts in build_param_map(spec).items()
    }


def _record_step(dump: Dump, spec: DecoderSpec, modules: Mapping[str, list[str]], trace: ActivationTrace) -> None:
    reader = _DumpReader(dump, modules, trace)
    if spec.embedding_scale == 1.0:
        reader.output("embedding.weight", -1, "embedding")
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}"
        reader.output(f"{at}.attention_norm.weight", index, "norm")
        reader.output(f"{at}.mlp_norm.weight", index, "mlp norm")
        if isinstance(layer.mixer, AttentionSpec):
            reader.attention(f"{at}.attention", index)
        if isinstance(layer.ffn, MoeSpec):
            reader.router(f"{at}.moe.router.weight", index)
        elif layer.ffn is not None:
            reader.output(f"{at}.mlp.down.weight", index, "mlp")
        last = index + 1 == spec.num_layers
        reader.residual("norm.weight" if last else f"layers.{index + 1}.attention_norm.weight", index)
    reader.rope(spec)
    reader.output("norm.weight", spec.num_layers, "final norm")


class _DumpReader:
    """Records the operations of one step in a trace."""

    def __init__(self, dump: Dump, modules: Mapping[str, list[str]], trace: ActivationTrace) -> None:
        self._dump = dump
        self._modules = modules
        self._trace = trace

    def _module(self, param: str) -> str:
        """The path of the module of a parameter; empty if there is not exactly one."""
        paths = self._modules.get(param, [])
        return paths[0] if len(paths) == 1 else ""

    def _outputs(self, path: str) -> list[Tensor]:
        outputs = self._dump.get(path, [])
        return [outputs] if isinstance(outputs, Tensor) else outputs

    def output(self, param: str, layer: int, operation: str) -> None:
        for x in self._outputs(self._module(param))[:1]:
            self._trace.record(layer, operation, x)

    def residual(self, param: str, layer: int) -> None:
        """The residual stream, which the next norm adds up and returns beside its output."""
        for x in self._outputs(self._module(param))[1:2]:
            self._trace.record(layer, "residual", x)

    def attention(self, param: str, layer: int) -> None:
        above = self._module(f"{param}.output.weight").rpartition(".")[0]
        self.output(f"{param}.output.weight", layer, "output")
        for path, operation in ((f"{above}.qkv_proj", "qkv"), (f"{above}.attn", "attention")):
            for x in self._outputs(path)[:1]:
                self._trace.record(layer, operation, x)

    def rope(self, spec: DecoderSpec) -> None:
        """RoPE of the last layer only: layers share the module, and the dump has its last outputs."""
        seen: list[Tensor] = []
        for index in reversed(range(spec.num_layers)):
            above = self._module(f"layers.{index}.attention.output.weight").rpartition(".")[0]
            both = self._outputs(f"{above}.rotary_emb")
            if len(both) == 2 and not any(torch.equal(both[0], q) for q in seen):
                seen.append(both[0])
                self._trace.record(index, "rotation", torch.cat([x.flatten(1) for x in both], -1))

    def router(self, param: str, layer: int) -> None:
        self.output(param, layer, "router")
        found = self._outputs(f"{self._module(param).rpartition('.')[0]}.topk")
        if len(found) >= 2 and found[0].shape == found[1].shape and not found[1].is_floating_point():
            record_experts(self._trace, layer, found[1].long(), found[0])
