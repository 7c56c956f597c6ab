"""Memory of a layer's backward pass at its widest, beyond all that the layer has saved, from the spec. No torch.

Gradients flow from the layer's end to its beginning, and what was saved is freed once it has been used. The widest is
one of a few moments: each is what is there beyond the saved tensors, less those that were freed before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles.models.accounting.linear_inputs import LayerAdapters
from miles.models.accounting.saved_tensors import SavedBytes
from miles.models.residual_spec import GatedResidualSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    MlpSpec,
    MoeSpec,
    RelativeAttentionSpec,
)

__all__ = ["LayerGradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGradients:
    """Bytes per token that a layer's backward pass holds at its widest, beyond all that the layer has saved.

    ``count`` is what modules save; the model has ``width`` channels. ``gathered``: parameters are sharded, and what is
    gathered of them has room for their gradients.
    """

    count: SavedBytes
    width: int
    adapters: LayerAdapters | None
    gathered: bool = False

    def layer(self, layer: LayerSpec, saved: float) -> float:
        """Of a layer that has ``saved`` this much in all; the mixer's backward runs when all behind it is freed."""
        count, width = self.count, self.width
        if not count.triton_training or count.sequence > 1:
            return saved + 2 * count.numbers(width)
        ffn = count.ffn_part(layer, width)
        moments = [*self._ends(layer, ffn), *(each - self._freed_first(layer) for each in self._ffn(layer, ffn))]
        moments += [each - ffn for each in self._mixer(layer)]
        behind = ffn + self._behind_mixer(layer)
        return max(self._residual(layer) + max(moments), *(each - behind for each in self._forward(layer)))

    def _residual(self, layer: LayerSpec) -> float:
        """The gradient of the residual stream, or of all of several, which is there throughout."""
        if layer.altup is not None:
            return self.count.numbers((layer.altup.streams + 1) * self.width)
        return self.count.numbers(self.width * (1 if layer.hyper is None else layer.hyper.streams))

    def _ends(self, layer: LayerSpec, ffn: float) -> Iterator[float]:
        """Moments at a layer's end: convolutions of its output, and residual streams that join it and are read."""
        if layer.output_kernel:
            # In float32: the gradient of the sum, that of each tap and of the taps' sum, and a product for the weights.
            yield 4.0 * self.width * (layer.output_kernel + 3)
        if layer.hyper is None:
            return
        streams = layer.hyper.streams * self.width
        if isinstance(layer.hyper, GatedResidualSpec):
            # Computed again in float32: the streams and their norm; and three gradients of them.
            yield 5 * 4.0 * streams - ffn
        else:
            # At the sum the gradients of the streams in front of it, of the output in each, and a product for weights.
            yield self.count.numbers(3 * streams)
            # The weights are computed again: streams and their norm in float32, and the gradients of both.
            yield 4 * 4.0 * streams - ffn

    def _behind_mixer(self, layer: LayerSpec) -> float:
        """What residual streams save behind the mixer."""
        match layer.hyper:
            case None:
                return 0.0
            case GatedResidualSpec():
                return self.count.gated_residual(layer.hyper, self.width)
            case _:
                return self.count.hyper_connection(layer.hyper, self.width)

    def _freed_first(self, layer: LayerSpec) -> float:
        """What was saved behind the feed-forward part: AltUp's corrected streams, the change, and what scales them."""
        altup = layer.altup
        saved = 0.0 if altup is None else self.count.numbers((altup.streams + 5) * self.width)
        return saved + (self.count.conv(self.width) if layer.output_kernel else 0.0)

    def _ffn(self, layer: LayerSpec, saved: float) -> Iterator[float]:
        ffn = layer.ffn
        if ffn is None or self._has_adapter("mlp.", "moe."):
            yield saved
        elif isinstance(ffn, MoeSpec):
            yield from self._moe(ffn, saved)
        else:
            yield from self._mlp(layer, ffn)

    def _mlp(self, layer: LayerSpec | None, ffn: MlpSpec) -> Iterator[float]:
        count = self.count
        if not ffn.gated:
            yield count.numbers(ffn.size * _SQUARED if ffn.activation == "relu2" else ffn.size)
            return
        # At the activation: the gradients of what it read and wrote. What it wrote is freed, if it was saved at all.
        wide = count.numbers(ffn.size * (2 if self.adapters is None else 3))
        has_norm = layer is not None and layer.post_norms
        yield wide + count.numbers(self.width * (int(ffn.learned_scale) + int(has_norm)))
        if (
            self.adapters is None and not self.gathered
        ):  # at the first projection: gradients of its output, its input and its weight
            weight = 2 * ffn.size * self.width / max(self.count.tokens, 1)
            yield count.numbers(self.width - ffn.size + weight)

    def _moe(self, ffn: MoeSpec, saved: float) -> Iterator[float]:
        """At the sum of a token's rows their gradients; at a projection the gradient of its weight too."""
        if self.adapters is not None and (ffn.weighed_shared or not ffn.gated):
            yield saved
            return
        count, rows = self.count, ffn.experts_per_token
        inner = ffn.latent or self.width
        widest = max(inner, 2 * ffn.size - inner)
        if not ffn.gated:
            widest = max(inner, (_SQUARED if ffn.activation == "relu2" else 1) * ffn.size - inner)
        if ffn.expert_bias:  # when it is added in the forward pass: the rows without it, and those of biases
            widest = max(2 * self.width, 3 * ffn.size - self.width)
        before = 0.0  # the shared expert's backward runs first: the gradient of its input, less what it saved
        if ffn.shared is not None:
            before = count.numbers(self.width) - count.mlp(ffn.shared)
            yield from self._mlp(None, ffn.shared)
        if ffn.weighed_shared:
            before = count.numbers(self.width - ffn.weighed_shared * (count.inner(ffn) + ffn.size))
            yield count.numbers(2 * ffn.weighed_shared * ffn.size)
        if ffn.beside_mlp:  # the gradients of both branches; their outputs and the sum of these are freed
            before = -count.numbers(self.width)
        yield count.numbers(rows * widest) + before
        if self.adapters is not None or self.gathered:
            return
        weight = ffn.num_experts * ffn.size * inner / max(count.tokens, 1)
        yield count.numbers(rows * ffn.size + weight) + before
        yield count.numbers((2 if ffn.gated else 1) * weight - rows * ffn.size) + before

    def _mixer(self, layer: LayerSpec) -> Iterator[float]:
        """Moments at the mixer, of whose layer all behind it is freed."""
        mixer, count = layer.mixer, self.count
        match mixer:
            case None:
                return
            case GatedDeltaNetSpec():  # a recurrence frees what it saved step by step
                yield 3 * 4.0 * mixer.value_heads * mixer.value_dim
            case MambaSpec():  # at the gate: gradients of its product, of the norm, and a product for the norm's weight
                inner = mixer.num_heads * mixer.head_dim
                yield 3 * 4.0 * inner - count.numbers(inner)
            case CompressedAttentionSpec():
                queries = mixer.num_heads * mixer.head_dim
                # Gradients of the output and of queries; of one sequence at a time a product of two in float32.
                product = 8 * queries * min(1.0, count.longest / max(count.tokens, 1))
                yield count.numbers(queries) + max(count.numbers(2 * queries), product)
            case RelativeAttentionSpec():
                queries = mixer.num_heads * mixer.head_dim
                yield count.numbers(queries) + 8.0 * queries
            case AttentionSpec() if count.fuses_attention(mixer):
                queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
                inputs = 2 * self.width if self._has_adapter("attention.") else 0
                # Those of the output, of queries, keys and values, and the sums of the queries' in float32.
                yield count.numbers(inputs + 2 * queries + 2 * keys) + 4.0 * queries
            case KimiDeltaSpec():
                return
            case _:
                yield count.mixer_part(layer, self.width)

    def _forward(self, layer: LayerSpec) -> Iterator[float]:
        """Moments of the forward pass at which a mixer holds more than it saves."""
        match layer.mixer:
            case KimiDeltaSpec() as mixer:
                yield self._kda(mixer)
            case _:
                yield 0.0

    def _kda(self, mixer: KimiDeltaSpec) -> float:
        """At the scores of queries: decays in float64 and float32 within sub-blocks of 16 tokens of
        one in four, a product with them, and what is only there until then; without the gate and the norm behind it.
        """
        inner = mixer.num_heads * mixer.head_dim
        decays = inner * (16 / 4) * (8 + 4) + 3 * inner
        locals_ = 4.0 * (2 + 2 + 1) * inner + self.count.numbers((3 + 2) * inner)
        return decays + locals_ - 4.0 * 4 * inner - self.count.numbers(inner)

    def _has_adapter(self, *prefixes: str) -> bool:
        return self.adapters is not None and any(name.startswith(prefixes) for name, _ in self.adapters.ranks)


# At a squared ReLU: the gradients of its output and input, the derivative in two steps, less the output.
_SQUARED = 3
