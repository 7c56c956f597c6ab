"""What a pipeline stage sends to the next one beside the residual stream: shared keys, selections, features.

Layers of later stages attend to the keys of a layer of this one, or to the tokens that its indexer selects, or add
features of the vision tower; a draft model reads the output of some layers on the last stage. All of it is behind the
channels of the residual stream in the one tensor that Megatron sends, so that gradients of keys and features come back
with those of the stream. Selections are integers, of which the bytes are sent. Captured outputs have no gradient.

Shapes: ``t`` slots of this rank, ``s`` those that are its own under sequence parallelism, 1 Megatron's batch dimension,
X channels of the residual stream, G key-value heads of this rank, d channels of a key.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.megatron.decoder_modules import rank_spec
from miles.backends.megatron.packed_batch import PackedParams
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.backends.megatron.vision_stage import spread_deepstack
from miles.models.spec import AttentionSpec, DecoderSpec, IndexerSpec, MlaSpec


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Layers in front of a stage whose ``keys`` or ``selections`` it or later stages use, and later layers that add
    features of the first stage (``deepstack``).
    """

    keys: tuple[int, ...]
    selections: tuple[int, ...]
    deepstack: tuple[int, ...]


def list_stage_inputs(spec: DecoderSpec, first: int) -> StageInputs:
    """List what the layers from ``first`` on use of the layers before."""
    later = [layer.mixer for layer in spec.layers[first:]]
    keys = {m.kv_source for m in later if isinstance(m, AttentionSpec) and m.kv_source is not None}
    indexers = [m.indexer for m in later if isinstance(m, MlaSpec) and m.indexer is not None]
    selections = {indexer.source for indexer in indexers if indexer.source is not None}
    count = 0 if spec.vision is None or not first else len(spec.vision.tower.deepstack_layers)
    return StageInputs(
        tuple(sorted(source for source in keys if source < first)),
        tuple(sorted(source for source in selections if source < first)),
        tuple(range(first, count)),
    )


class StageTensors:
    """Packs what later stages need, and unpacks what this one, from layer ``first`` to before ``end``, has got."""

    def __init__(self, config: DecoderTransformerConfig, *, first: int, end: int) -> None:
        spec = config.decoder_spec
        self._width = spec.hidden_size
        self._streams = spec.streams if spec.altup is None else spec.altup.streams
        self._first, self._end = first, end
        self._got, self._sent = list_stage_inputs(spec, first), list_stage_inputs(spec, end)
        self._layers = rank_spec(config).layers
        # Another stage of this rank may have made the selections, and select them again in backward.
        self._keeps_selections = config.virtual_pipeline_model_parallel_size is not None

    def send(self, x_s1X: Tensor, packed: PackedParams) -> Tensor:
        """Return the residual stream with what later stages need behind it, which is then no view."""
        parts = [x_s1X]
        for source in self._sent.keys:
            parts += [_fold(each, x_s1X) for each in packed.positions.shared_kv[source]]
        for source in self._sent.selections:
            indexer = self._indexer(source)
            listed_Tt = packed.attn_backend.list_selection(source, indexer.top, indexer.pool)
            parts.append(_fold(listed_Tt.view(x_s1X.dtype), x_s1X))
        if packed.has_images:
            like_s1D = x_s1X[..., : self._width]
            parts += [spread_deepstack(packed, layer, like_s1D).unsqueeze(1) for layer in self._sent.deepstack]
        if packed.capture is not None:
            parts += [_fold(packed.capture.state(layer), x_s1X) for layer in _list_captured(packed, self._end)]
        return x_s1X if len(parts) == 1 else torch.cat(parts, -1)

    def receive(self, received_s1X: Tensor, packed: PackedParams) -> Tensor:
        """Return the residual stream; ``packed`` gets what came with it, until the backward of this stage is done."""
        slots = len(packed.tokens_t)
        each = slots // len(packed.tokens_s)
        widths = [2 * self._key_width(source) * each for source in self._got.keys]
        per_number = 4 // received_s1X.element_size() * each
        widths += [self._count(source) * per_number for source in self._got.selections]
        widths += [self._width] * len(self._got.deepstack) if packed.has_images else []
        captured = _list_captured(packed, self._first)
        widths += [self._streams * self._width] * len(captured)
        rest = received_s1X.shape[-1] - sum(widths)
        x_s1X, *parts = received_s1X.split([rest, *widths], -1)
        taken = iter(parts)
        for source in self._got.keys:
            k_s1x, v_s1x = next(taken).chunk(2, -1)
            shape = (slots, -1, self._attention(source).head_dim)
            packed.positions.shared_kv[source] = k_s1x.reshape(shape), v_s1x.reshape(shape)
            _drop_after(received_s1X, lambda source=source: packed.positions.shared_kv.pop(source, None))
        for source in self._got.selections:
            indexer, bytes_s1x = self._indexer(source), next(taken).detach()
            listed_Tt = bytes_s1x.reshape(slots, -1).view(torch.int32)
            packed.attn_backend.set_selection(source, listed_Tt, indexer.top, indexer.pool)
            if not self._keeps_selections:
                _drop_after(received_s1X, lambda source=source: packed.attn_backend.drop_selection(source))
        if packed.has_images:
            packed.sent_deepstack_sD |= {layer: next(taken).squeeze(1) for layer in self._got.deepstack}
            _drop_after(received_s1X, packed.sent_deepstack_sD.clear)
        if packed.capture is not None:
            for layer in captured:
                packed.capture.store(layer, next(taken).unflatten(-1, (self._streams, -1)).squeeze(1), None)
        return x_s1X

    def _attention(self, layer: int) -> AttentionSpec:
        mixer = self._layers[layer].mixer
        assert isinstance(mixer, AttentionSpec)
        return mixer

    def _key_width(self, layer: int) -> int:
        mixer = self._attention(layer)
        return mixer.num_kv_heads * mixer.head_dim

    def _indexer(self, layer: int) -> IndexerSpec:
        mixer = self._layers[layer].mixer
        assert isinstance(mixer, MlaSpec) and mixer.indexer is not None
        return mixer.indexer

    def _count(self, layer: int) -> int:
        indexer = self._indexer(layer)
        return indexer.top + indexer.pool - 1


def _fold(x_t: Tensor, like_s1X: Tensor) -> Tensor:
    """Return rows of all slots as channels of this rank's own."""
    assert x_t.dtype == like_s1X.dtype
    return x_t.reshape(len(like_s1X), 1, -1)


def _list_captured(packed: PackedParams, end: int) -> list[int]:
    """List the layers before ``end`` whose output is captured."""
    return [] if packed.capture is None else sorted({layer for layer in packed.capture.layers if layer < end})


def _drop_after(received_s1X: Tensor, drop: Callable[[], object]) -> None:
    """Call ``drop`` when the backward of this stage is done."""
    if received_s1X.requires_grad:
        received_s1X.register_hook(lambda _: drop() and None)
