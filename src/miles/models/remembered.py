"""What an engine must remember of each layer: so much for every token, or so much for every sequence. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from miles.kernels.arithmetic import exact
from miles.models.spec import AttentionSpec, DeltaSpec, MambaSpec, Mixer, MlaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """A key and a value for each of ``heads``, and an index key. A ``value_dim`` of 0 reads values off the keys."""

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0

    @property
    def numbers(self) -> int:
        """How many in all."""
        return self.heads * (self.key_dim + self.value_dim) + self.index_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSequence:
    """Tensors of a fixed size; those that are ``wide`` are float32 whatever the weights are."""

    shapes: tuple[tuple[int, ...], ...]
    wide: tuple[bool, ...]


def remembered(mixer: Mixer | None) -> PerToken | PerSequence | None:
    """What tokens yet to come need of this mixer; None for nothing."""
    match mixer:
        case None:
            return None
        case AttentionSpec():
            return PerToken(heads=mixer.num_kv_heads, key_dim=mixer.head_dim, value_dim=mixer.head_dim)
        case MlaSpec():
            own = mixer.indexer is not None and mixer.indexer.source is None
            index = mixer.indexer.head_dim if mixer.indexer is not None and own else 0
            if exact():  # latent attention is computed from keys and values in both planes
                return PerToken(heads=mixer.num_heads, key_dim=mixer.head_dim, value_dim=mixer.value_dim)
            return PerToken(heads=1, key_dim=mixer.kv_rank + mixer.rope_dim, value_dim=0, index_dim=index)
        case DeltaSpec():
            channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
            state = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
            return PerSequence(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
        case MambaSpec():
            channels = mixer.num_heads * mixer.head_dim + 2 * mixer.groups * mixer.state_dim
            state = (mixer.num_heads, mixer.head_dim, mixer.state_dim)
            return PerSequence(shapes=((channels, mixer.kernel - 1), state), wide=(False, True))
