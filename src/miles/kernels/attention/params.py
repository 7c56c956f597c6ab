"""Attention parameters of a layer, and the inputs of one attention call.

Shapes: T tokens, H query heads (of ``IndexerInputs``: indexer heads), G key-value heads, d channels of a key, e of a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from miles.kernels.runtime.kv_cache import KVScales


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """Softmax scale, softcap and mask of one layer's causal attention.

    Scores are multiplied by ``scale``, then bounded by ``softcap``. A token attends to itself and to earlier tokens: to
    at most ``window`` tokens in all, and to none outside its own ``chunk`` of positions. Tokens of a bidirectional
    span, where a batch has some, attend to all of it, unless the layer ``ignores_spans``.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    ignores_spans: bool = False


class KeyPool(Protocol):
    """How the key of a pool of ``size`` consecutive tokens follows from what the tokens cache."""

    @property
    def size(self) -> int: ...

    def __call__(self, keys_Sx: Tensor, /) -> Tensor:
        """Return the keys of a sequence's complete pools, [..., p, d]; tokens behind the last one are left out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerInputs:
    """Sparse attention (DSA): a token attends to the ``topk`` tokens with the largest sum of ``weights * relu(q . k)``.

    No gradient flows through the selection. ``weights_TH`` include the scales. With ``pool`` pools of tokens are scored
    and selected (``index_pools``), and ``k_Td`` are what it makes their keys of.
    """

    q_THd: Tensor
    k_Td: Tensor
    weights_TH: Tensor
    topk: int
    pool: KeyPool | None = None

    @property
    def max_selected(self) -> int:
        """The number of tokens up to which all are selected."""
        return self.topk

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return 1 if self.pool is None else self.pool.size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerInputs:
    """Block-sparse attention: a key-value head attends to the ``topk`` blocks of ``block`` tokens of largest q . k.

    A block counts by its best token. The ``local`` last blocks, that of the token itself included, are always among
    the selected ones. No gradient flows through the selection. There is one indexer query for each key-value head.
    """

    q_TGd: Tensor
    k_Td: Tensor
    block: int
    topk: int
    local: int

    @property
    def max_selected(self) -> int:
        """The number of tokens up to which all are selected."""
        return self.topk * self.block

    @property
    def unit(self) -> int:
        """Tokens that are selected together."""
        return self.block


class AttentionInputs(NamedTuple):
    """One layer's attention call.

    ``sinks_H`` are attention-sink logits. ``indexer`` restricts attention to the tokens or blocks an indexer selects;
    an integer reuses the selection that layer made in the same forward.
    """

    q_THd: Tensor
    k_TGd: Tensor
    v_TGe: Tensor
    params: AttentionParams
    sinks_H: Tensor | None = None
    indexer: IndexerInputs | BlockIndexerInputs | int | None = None


class RelativeBias(NamedTuple):
    """A position bias of scores: at distance e it is ``weights_THr`` of the query times ``profiles_rE[:, e]``.

    From distance E on it is zero. Scores are scaled before it is added.
    """

    weights_THr: Tensor
    profiles_rE: Tensor


@runtime_checkable
class RelativeAttentionBackend(Protocol):
    """An attention backend that adds a relative position bias to scores."""

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend to earlier tokens, as ``AttentionBackend.__call__`` does, with the bias."""
        ...


class SequenceShard(Protocol):
    """Context parallelism of a recurrent layer: this rank scans ``parts`` of the sequences, so many tokens of each, and
    states are passed between ranks.
    """

    @property
    def parts(self) -> Sequence[int]: ...

    def read_earlier(self, x_tC: Tensor, count: int) -> Tensor:
        """Return the last ``count`` rows before each part, [B, C, count]; zeros before the first of a sequence."""
        ...

    def pass_states(self, ends_Bx: Tensor, advance: Callable[[Tensor | None, Tensor], Tensor]) -> Tensor:
        """Return the state before each part, [B, ...], given what each rank computed of its parts.

        ``advance`` moves a state, None at the start of a sequence, past a part; states before those are zeros.
        """
        ...

    def carry_states(self, start_Nx: Tensor, step: Callable[[int, Tensor], Tensor], *, reverse: bool = False) -> None:
        """Call ``step`` for the early chunks of this rank (0) and for its late ones (1), each with what the step of the
        chunks before them returned, from ``start_Nx`` on; in ``reverse`` from the last chunk to the first.
        """
        ...


class SequenceExchange(Protocol):
    """Context parallelism of a recurrent layer: this rank scans whole sequences of ``lengths``, whose tokens it
    collects from all ranks.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    def collect(self, x_t: Tensor) -> Tensor:
        """Return the rows of the sequences that this rank scans, given those of this rank's tokens."""
        ...

    def send_back(self, x_S: Tensor) -> Tensor:
        """Return the rows of this rank's tokens, given those of the sequences that this rank scans."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedSequences:
    """The sequences of which this rank has tokens: those that are ``split``, and those that a rank scans ``whole``.

    If there are both, ``rows`` are the tokens of each, and ``order`` restores the order of all.
    """

    split: SequenceShard | None
    whole: SequenceExchange | None
    rows: tuple[Tensor, Tensor] | None = None
    order: Tensor | None = None


class PagedAttentionParams(NamedTuple):
    """``AttentionParams``, attention sinks and page size as the Triton kernels take them; page size 0: no pages.

    With ``kv_scales`` keys and values are the bytes of an FP8 KV cache.
    """

    page_size: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    kv_scales: KVScales | None = None
