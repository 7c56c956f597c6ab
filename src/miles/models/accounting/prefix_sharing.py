"""Cost model of prefix sharing in training: the matmuls of shared tokens against slower attention. No torch.

Costs are in FLOPs at the rate of matmuls. Sharing a prefix removes its copies from all matmuls, and replaces attention
over whole sequences by attention over segments, whose keys are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from miles.kernels.numerics import Numerics
from miles.models.accounting.params import forward_flops_per_token, kv_bytes_per_token
from miles.models.spec import DecoderSpec

MIN_SPEEDUP = 1.05
"""The least estimated speedup for which prefixes are shared."""
# Rates of attention kernels relative to matmuls, on one H200 (650 TFLOP/s): the dense kernel of long sequences, and the
# varlen kernel of short ones and of segments, whose backward expands the key-value heads.
_DENSE_RATE, _VARLEN_RATE = 0.65, 0.2
# The dense kernel computes sequences of one length that have so many tokens each, and in all.
_DENSE_TOKENS, _DENSE_BATCH = 1024, 4096
# Gathered keys and values are read and written five times in forward and backward, which counts as three forwards; a
# byte takes as long as so many FLOPs.
_GATHER_FLOPS_PER_BYTE = 150 * 5 / 3


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Input tokens, and the pairs of queries and keys that each kernel computes; ``gathered`` keys are copied."""

    tokens: int
    dense_pairs: float = 0.0
    varlen_pairs: float = 0.0
    gathered: int = 0


def count_sequences(lengths: Iterable[int]) -> AttentionWork:
    """Return the work of whole sequences.

    >>> count_sequences([10, 2000, 2000, 2000])
    AttentionWork(tokens=6010, dense_pairs=6000000.0, varlen_pairs=50.0, gathered=0)
    """
    tokens = 0
    dense = varlen = 0.0
    for length, count in Counter(lengths).items():
        pairs = count * length * length / 2
        is_dense = length >= _DENSE_TOKENS and length * count >= _DENSE_BATCH
        dense, varlen = (dense + pairs, varlen) if is_dense else (dense, varlen + pairs)
        tokens += count * length
    return AttentionWork(tokens=tokens, dense_pairs=dense, varlen_pairs=varlen)


def count_segments(segments: Iterable[tuple[int, int]]) -> AttentionWork:
    """Return the work of a prefix tree, whose segments have tokens from a first position up to another one.

    >>> count_segments([(0, 10), (10, 14), (10, 12)])
    AttentionWork(tokens=16, dense_pairs=0.0, varlen_pairs=120.0, gathered=36)
    """
    segments = list(segments)
    pairs = sum(end * end - start * start for start, end in segments) / 2
    tokens, keys = sum(end - start for start, end in segments), sum(end for _, end in segments)
    return AttentionWork(tokens=tokens, varlen_pairs=pairs, gathered=keys)


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """Estimates of what a model's training costs with and without shared prefixes, with weights of ``dtype``."""

    spec: DecoderSpec
    dtype: str
    numerics: Numerics
    _per_token: float = field(init=False, repr=False, compare=False)
    _per_gathered: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Only trained tokens, which are not shared, have logits.
        head = 2.0 * self.spec.vocab_size * self.spec.hidden_size
        object.__setattr__(self, "_per_token", forward_flops_per_token(self.spec) - head)
        gathered = kv_bytes_per_token(self.spec, self.dtype, self.numerics) * _GATHER_FLOPS_PER_BYTE
        object.__setattr__(self, "_per_gathered", gathered)

    def estimate_speedup(self, plain: AttentionWork, shared: AttentionWork) -> float:
        """Return how many times faster the layers of ``shared`` samples are than those of ``plain`` ones."""
        cost = self._estimate(shared)
        return self._estimate(plain) / cost if cost else 1.0

    def pays(self, plain: AttentionWork, shared: AttentionWork) -> bool:
        """Return whether to share."""
        return self.estimate_speedup(plain, shared) >= MIN_SPEEDUP

    def _estimate(self, work: AttentionWork) -> float:
        if not work.tokens:
            return 0.0
        pairs = work.dense_pairs + work.varlen_pairs
        scaled = work.dense_pairs / _DENSE_RATE + work.varlen_pairs / _VARLEN_RATE
        attention = forward_flops_per_token(self.spec, pairs / work.tokens) - forward_flops_per_token(self.spec)
        slowdown = scaled / pairs if pairs else 1.0
        return work.tokens * (self._per_token + attention * slowdown) + work.gathered * self._per_gathered
