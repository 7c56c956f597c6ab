"""KV-cache and recurrent-state layout of each layer: per token, or per sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles.kernels.numerics import Numerics
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
    output_conv_state,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTokenCache:
    """A key and a value for each of ``heads``, and an indexer key. With ``value_dim`` 0 values are a slice of the keys
    (MLA), whose last ``rope_dim`` channels have an FP8 scale of their own.
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    rope_dim: int = 0

    def bytes_per_token(self, size: int, numerics: Numerics) -> int:
        """Bytes of one token in a model whose numbers have ``size`` bytes; FP8 adds a float32 scale per vector.

        >>> layout = PerTokenCache(heads=8, key_dim=128, value_dim=128)
        >>> fp8 = Numerics(batch_invariant=False, kv_cache_dtype="fp8_e4m3")
        >>> layout.bytes_per_token(2, Numerics(batch_invariant=False)), layout.bytes_per_token(2, fp8)
        (4096, 2112)
        """
        values, index = self.heads * (self.key_dim + self.value_dim), self.index_dim * size
        if not numerics.fp8_kv_cache:
            return values * size + index
        return values + 4 * self.heads * (1 + (self.value_dim > 0) + (self.rope_dim > 0)) + index


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSequenceState:
    """Recurrent state tensors of fixed size; those marked ``wide`` are float32 whatever the weights are."""

    shapes: tuple[tuple[int, ...], ...]
    wide: tuple[bool, ...]


def cache_layout(mixer: Mixer | None, numerics: Numerics) -> PerTokenCache | PerSequenceState | None:
    """Return what this mixer caches for later tokens; None for nothing."""
    match mixer:
        case None:
            return None
        case AttentionSpec():
            return PerTokenCache(
                heads=mixer.num_kv_heads,
                key_dim=mixer.head_dim,
                value_dim=mixer.head_dim,
                index_dim=0 if mixer.indexer is None else mixer.indexer.head_dim,
            )
        case RelativeAttentionSpec():  # and, beside it, the state of a convolution (``list_states``)
            return PerTokenCache(heads=mixer.num_kv_heads, key_dim=mixer.head_dim, value_dim=mixer.head_dim)
        case MlaSpec():
            return _lay_out_mla(mixer, numerics)
        case CompressedAttentionSpec():  # the state of a token is kept where an indexer's key is
            index = 0 if mixer.compressor is None else mixer.compressor.state_dim(mixer.head_dim)
            rope_dim = mixer.rope.dim or 0
            return PerTokenCache(heads=1, key_dim=mixer.head_dim, value_dim=0, index_dim=index, rope_dim=rope_dim)
        case GatedDeltaNetSpec():
            channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
            state = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
            return PerSequenceState(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
        case KimiDeltaSpec():
            channels = 3 * mixer.num_heads * mixer.head_dim
            state = (mixer.num_heads, mixer.head_dim, mixer.head_dim)
            return PerSequenceState(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
        case MambaSpec():
            channels = mixer.num_heads * mixer.head_dim + 2 * mixer.groups * mixer.state_dim
            state = (mixer.num_heads, mixer.head_dim, mixer.state_dim)
            return PerSequenceState(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
        case ShortConvSpec():
            return PerSequenceState(shapes=((mixer.channels, mixer.kernel - 1),), wide=(False,))


def list_states(spec: DecoderSpec, numerics: Numerics) -> dict[int, PerSequenceState]:
    """Return the recurrent states of a sequence by their numbers: those of layers, and behind them of convolutions of
    their outputs and of n-gram embeddings.
    """
    states: dict[int, PerSequenceState] = {}
    for i, layer in enumerate(spec.layers):
        layout = cache_layout(layer.mixer, numerics)
        if isinstance(layout, PerSequenceState):
            states[i] = layout
        elif isinstance(layer.mixer, RelativeAttentionSpec):
            states[i] = _conv_state(layer.mixer.kv_channels, layer.mixer.kernel)
        if layer.output_kernel:
            state = _conv_state(spec.hidden_size, layer.output_kernel)
            states |= {output_conv_state(spec, i, "mixer"): state} if layer.mixer is not None else {}
            states |= {output_conv_state(spec, i, "ffn"): state} if layer.ffn is not None else {}
        if layer.ngram is not None:
            inputs = (spec.streams * spec.hidden_size, layer.ngram.reach)
            # The ids of tokens are kept as float32, which has all those of a vocabulary.
            shapes = (inputs, (layer.ngram.order - 1,))
            states[ngram_state_key(spec, i)] = PerSequenceState(shapes=shapes, wide=(False, True))
    return states


def ngram_state_key(spec: DecoderSpec, layer: int) -> int:
    """Return the key of the state of a layer's n-gram embeddings, behind those of output convolutions."""
    return 3 * spec.num_layers + layer


def _conv_state(channels: int, kernel: int) -> PerSequenceState:
    """The last inputs of a convolution."""
    return PerSequenceState(shapes=((channels, kernel - 1),), wide=(False,))


def _lay_out_mla(mixer: MlaSpec, numerics: Numerics) -> PerTokenCache:
    has_indexer = mixer.indexer is not None and mixer.indexer.source is None
    index = mixer.indexer.head_dim if mixer.indexer is not None and has_indexer else 0
    if mixer.indexer is not None and mixer.indexer.pool > 1:  # a gate of each channel of a key
        index *= 2
    if numerics.batch_invariant:  # the engine then caches expanded keys and values, as the trainer computes them
        return PerTokenCache(heads=mixer.num_heads, key_dim=mixer.head_dim, value_dim=mixer.value_dim, index_dim=index)
    return PerTokenCache(
        heads=1,
        key_dim=mixer.kv_rank + mixer.rope_dim,
        value_dim=0,
        index_dim=index,
        rope_dim=mixer.rope_dim,
    )
