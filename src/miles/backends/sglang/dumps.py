"""What every operation of stock SGLang gave, under the names of ours (see ``models.taps``).

A server started with ``FLAG`` and a folder writes what its modules gave in every step to a file there. They are found
by the checkpoint's tensors, which both share: what has no module of its own, or one that layers share, is not told.

Shapes: T tokens of a step, k experts a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from miles.core.errors import EngineError
from miles.core.types import Tokens
from miles.models.names import pieces
from miles.models.spec import AttentionSpec, DecoderSpec, MoeSpec
from miles.models.taps import Trace, chosen

FLAG = "--debug-tensor-dump-output-folder"
Dump = Mapping[str, "Tensor | list[Tensor]"]
_TOKENS, _PLACES = "model.forward_batch_info.input_ids", "model.forward_batch_info.positions"


def steps_in(folder: Path) -> list[Path]:
    """The steps there are by now, in order."""
    return sorted(folder.rglob("Pass*.pt"))


def read(steps: Sequence[Path], spec: DecoderSpec, sequences: Sequence[Tokens], trace: Trace) -> None:
    """Leave in ``trace`` what the ``steps`` tell of ``sequences``, which were asked for one after the other."""
    names = _names(spec)
    waiting = iter(steps)
    for tokens in sequences:
        done = 0
        while done < len(tokens):
            path = next(waiting, None)
            if path is None:
                raise EngineError(f"SGLang told of {done} of {len(tokens)} tokens; is its context long enough?")
            dump: Dump = torch.load(path, map_location="cpu", weights_only=True)
            count = _follows(dump, tokens, done)
            if count:
                _keep(dump, spec, names, trace)
            done += count


def _follows(dump: Dump, tokens: Tokens, done: int) -> int:
    """How many of ``tokens`` from ``done`` on a step is of; 0 for a step that somebody else asked for."""
    ids, places = dump.get(_TOKENS), dump.get(_PLACES)
    if not isinstance(ids, Tensor) or not isinstance(places, Tensor):
        return 0
    given = list(range(done, done + len(ids)))
    same = places.tolist() == given and given[-1] < len(tokens) and ids.tolist() == [int(tokens[i]) for i in given]
    return len(ids) if same else 0


def _names(spec: DecoderSpec) -> dict[str, list[str]]:
    """The modules that a parameter of ours lies in, by its name."""
    return {
        ours: list(dict.fromkeys(p.hf_name.rpartition(".")[0] for p in sorted(parts, key=lambda p: p.start)))
        for ours, parts in pieces(spec).items()
    }


def _keep(dump: Dump, spec: DecoderSpec, names: Mapping[str, list[str]], trace: Trace) -> None:
    told = _Told(dump, names, trace)
    if spec.embedding_scale == 1.0:
        told.given("embedding.weight", -1, "embedding")
    for index, layer in enumerate(spec.layers):
        at = f"layers.{index}"
        told.given(f"{at}.attention_norm.weight", index, "norm")
        told.given(f"{at}.mlp_norm.weight", index, "mlp norm")
        if isinstance(layer.mixer, AttentionSpec):
            told.attention(f"{at}.attention", index)
        if isinstance(layer.ffn, MoeSpec):
            told.routed(f"{at}.moe.router.weight", index)
        elif layer.ffn is not None:
            told.given(f"{at}.mlp.down.weight", index, "mlp")
        last = index + 1 == spec.num_layers
        told.stream("norm.weight" if last else f"layers.{index + 1}.attention_norm.weight", index)
    told.rotations(spec)
    told.given("norm.weight", spec.num_layers, "final norm")


class _Told:
    """One step's operations on their way into a trace."""

    def __init__(self, dump: Dump, names: Mapping[str, list[str]], trace: Trace) -> None:
        self._dump, self._names, self._trace = dump, names, trace

    def _module(self, ours: str) -> str:
        """The path of the one module that has a parameter of ours; empty where there is none."""
        paths = self._names.get(ours, [])
        return paths[0] if len(paths) == 1 else ""

    def _found(self, path: str) -> list[Tensor]:
        found = self._dump.get(path, [])
        return [found] if isinstance(found, Tensor) else found

    def given(self, ours: str, layer: int, operation: str) -> None:
        for x in self._found(self._module(ours))[:1]:
            self._trace.keep(layer, operation, x)

    def stream(self, ours: str, layer: int) -> None:
        """The residual stream, which the next norm joins and gives beside its own."""
        for x in self._found(self._module(ours))[1:2]:
            self._trace.keep(layer, "residual", x)

    def attention(self, ours: str, layer: int) -> None:
        above = self._module(f"{ours}.output.weight").rpartition(".")[0]
        self.given(f"{ours}.output.weight", layer, "output")
        for path, operation in ((f"{above}.qkv_proj", "qkv"), (f"{above}.attn", "attention")):
            for x in self._found(path)[:1]:
                self._trace.keep(layer, operation, x)

    def rotations(self, spec: DecoderSpec) -> None:
        """Layers share the module that rotates, and only the last one's values are left: told of that alone."""
        seen: list[Tensor] = []
        for index in reversed(range(spec.num_layers)):
            above = self._module(f"layers.{index}.attention.output.weight").rpartition(".")[0]
            both = self._found(f"{above}.rotary_emb")
            if len(both) == 2 and not any(torch.equal(both[0], q) for q in seen):
                seen.append(both[0])
                self._trace.keep(index, "rotation", torch.cat([x.flatten(1) for x in both], -1))

    def routed(self, ours: str, layer: int) -> None:
        self.given(ours, layer, "router")
        found = self._found(f"{self._module(ours).rpartition('.')[0]}.topk")
        if len(found) >= 2 and found[0].shape == found[1].shape and not found[1].is_floating_point():
            chosen(self._trace, layer, found[1].long(), found[0])
