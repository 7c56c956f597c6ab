"""KV-cache and recurrent-state layout of each layer: per token, or per sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles.kernels.numerics import Numerics
from miles.models.spec import AttentionSpec, GatedDeltaNetSpec, MambaSpec, Mixer, MlaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PerTokenCache:
    """A key and a value for each of ``heads``, and an indexer key. With ``value_dim`` 0 values are a slice of the keys
    (MLA).
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0

    @property
    def numbers(self) -> int:
        """Values per token."""
        return self.heads * (self.key_dim + self.value_dim) + self.index_dim


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
            return PerTokenCache(heads=mixer.num_kv_heads, key_dim=mixer.head_dim, value_dim=mixer.head_dim)
        case MlaSpec():
            has_indexer = mixer.indexer is not None and mixer.indexer.source is None
            index = mixer.indexer.head_dim if mixer.indexer is not None and has_indexer else 0
            if (
                numerics.batch_invariant
            ):  # the engine then caches expanded keys and values, as the trainer computes them
                return PerTokenCache(heads=mixer.num_heads, key_dim=mixer.head_dim, value_dim=mixer.value_dim)
            return PerTokenCache(heads=1, key_dim=mixer.kv_rank + mixer.rope_dim, value_dim=0, index_dim=index)
        case GatedDeltaNetSpec():
            channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
            state = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
            return PerSequenceState(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
        case MambaSpec():
            channels = mixer.num_heads * mixer.head_dim + 2 * mixer.groups * mixer.state_dim
            state = (mixer.num_heads, mixer.head_dim, mixer.state_dim)
            return PerSequenceState(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
