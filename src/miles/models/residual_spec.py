"""Specs of residual streams: AltUp, hyper-connections (mHC and gated), and n-gram embeddings that are added to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """AltUp (alternating updates): ``streams`` residual streams, of which a layer computes the ``active`` one.

    A layer first predicts all streams from all of them, and then corrects them by the difference between its output and
    the prediction.
    """

    streams: int
    active: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams:
            raise ValueError(f"stream {self.active} is none of the {self.streams} streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionSpec:
    """Hyper-connections (mHC): ``streams`` residual streams, mixed by matrices of so many Sinkhorn ``iterations``.

    Behind the last layer the mean of the streams is taken, or with ``learned_join`` a weighted sum.
    """

    streams: int
    iterations: int
    eps: float
    learned_join: bool = False

    @property
    def num_weights(self) -> int:
        """Weights of a token: to read and to write each stream, and the matrix that mixes them."""
        return self.streams * (2 + self.streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedResidualSpec:
    """Gated hyper-connections: ``streams`` residual streams, which a part reads through a gate of each channel.

    The gates come from all normalized streams, by projections of rank ``rank``; this norm is the only one in front of a
    part. Its output is added to each stream with a weight of its own. Behind the last layer the streams are read so
    once more.
    """

    streams: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """N-gram embeddings: what a layer adds to its residual streams, from hashes of a token and of those before it.

    Each order from 2 to ``order`` has the same number of heads; head h hashes its n-gram into one of ``head_sizes[h]``
    rows of a common table of ``rows``. All heads together are ``dim`` channels. Tokens at and before an
    ``end_token_id`` count as it. ``multipliers`` are those of the hash, one for each token. The result is gated, and
    convolved with ``kernel`` taps that are ``order`` tokens apart. The checkpoint has the table in ``shards``.
    """

    dim: int
    order: int
    kernel: int
    head_sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    rows: int
    end_token_id: int
    shards: int

    def __post_init__(self) -> None:
        if self.order < 2 or len(self.head_sizes) % (self.order - 1) or len(self.multipliers) != self.order:
            raise ValueError("n-grams have an order of at least 2, as many heads of each, and a multiplier per token")
        if self.dim % len(self.head_sizes):
            raise ValueError(f"{self.dim} channels are not a multiple of the {len(self.head_sizes)} n-gram heads")

    @property
    def reach(self) -> int:
        """Earlier tokens that the convolution reads."""
        return (self.kernel - 1) * self.order
