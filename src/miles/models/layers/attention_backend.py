"""AttentionBackend: the protocol between a decoder and its KV cache (an engine's paged cache, or a packed batch).

Shapes: T tokens of a forward, H query heads, G key-value heads, d channels of a key, e of a value, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from miles.kernels.attention.params import (
    AttentionInputs,
    AttentionParams,
    BlockIndexerInputs,
    IndexerInputs,
    SequenceShard,
    ShardedSequences,
)

__all__ = [
    "AttentionBackend",
    "AttentionInputs",
    "AttentionParams",
    "BlockIndexerInputs",
    "IndexerInputs",
    "RecurrentState",
    "SequenceShard",
    "ShardedSequences",
]


class RecurrentState(Protocol):
    """The state of a recurrent layer before this forward.

    The tokens of the forward are sequences of ``lengths``, one after the other. ``state`` has a row for each, zeros for
    a sequence that starts here; None if all start here and their final states are not needed.

    With ``levels`` some sequences continue others of the same forward: each level is the rows of its tokens and their
    state, to be read once the levels before it are stored. Then ``state`` is that of none.

    With a ``shard`` the tokens of the forward are some of those of ``lengths``.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def state(self) -> tuple[Tensor, ...] | None: ...

    @property
    def levels(self) -> Sequence[tuple[Tensor, RecurrentState]]: ...

    @property
    def shard(self) -> ShardedSequences | None: ...

    def update(self, state: tuple[Tensor, ...]) -> None:
        """Store the new states, rows in the same order."""
        ...


class AttentionBackend(Protocol):
    """Computes attention and owns the KV cache. With ``latent``, MLA passes its latent vectors in place of keys and
    values.

    ``sinks_H`` are per-head attention-sink logits. ``index`` are the inputs of an indexer of tokens (DSA) or blocks; a
    layer number reuses the selection that layer made in this forward.
    """

    latent: bool

    def __call__(self, layer: int, inputs: AttentionInputs, /) -> Tensor: ...

    def recurrent_state(self, layer: int) -> RecurrentState:
        """Return the state of a recurrent layer, and where to store the new one."""
        ...
