"""KV-cache and recurrent-state layout of each layer: per token, or per sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles.kernels.numerics import Numerics
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    ShortConvSpec,
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
