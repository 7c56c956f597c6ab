"""What a decoder is, in numbers: everything the one implementation must know to be any of the families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "llama3", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: the base, and how the frequencies are stretched for long contexts.

    ``factor`` counts for ``linear`` and ``llama3``, the other three for ``llama3`` alone.

    >>> RopeSpec(theta=1e6).kind
    'default'
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: ``layers`` are the layers that have one, ascending; all others have a plain MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer. ``eos_token_ids`` are the tokens that end a response."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending; empty for a dense model."""
        return () if self.moe is None else self.moe.layers
