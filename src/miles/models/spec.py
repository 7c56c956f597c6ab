"""What a decoder is, in numbers: everything the one implementation must know to be any of the families.

A decoder is a tuple of layers. A layer is a mixer (how tokens look at each other), a feed-forward part (what each
makes of it), or both, and every kind of either is a frozen description here and a module beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
Activation = Literal["silu", "gelu_tanh", "relu2", "swiglu_clamped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: the base, which channels turn, and how the frequencies are stretched for long contexts.

    The first ``dim`` channels of a head turn (None: all of them); ``interleaved`` pairs neighbours instead of halves.
    ``scale`` multiplies cosines and sines. ``original_max_positions`` is what the model was first trained for: it
    counts for every kind but ``default`` and ``linear``. ``dynamic`` stretches only what lies beyond it.
    ``longrope`` divides the frequencies by ``short_factors``, or by ``long_factors`` where the decoder's
    ``max_positions`` goes beyond it.

    >>> RopeSpec(theta=1e6).kind
    'default'
    """

    theta: float
    kind: RopeKind = "default"
    dim: int | None = None
    interleaved: bool = False
    factor: float = 1.0
    scale: float = 1.0
    original_max_positions: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


# -- mixers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Softmax attention with grouped queries.

    ``rope`` None is a layer that does not know positions. ``qk_norm`` says over what queries and keys are normalised
    before they are rotated: each head, or all heads at once; ``unit`` is without weights and after. ``window`` is
    how many tokens a token sees, itself among them; ``chunk`` cuts positions into blocks that see only themselves.
    ``scale`` None is ``head_dim ** -0.5``. ``gated`` multiplies the output by a sigmoid the query projection also
    gives. ``temperature`` (floor, slope and, unless it is one, how many positions ahead of a multiple of the floor)
    sharpens queries with their position.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qk_norm: Literal["none", "head", "all", "unit"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    gated: bool = False
    temperature: tuple[float, float] | tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.rope is not None and (self.rope.dim or self.head_dim) % 2:
            raise ValueError(f"rotary positions need an even number of channels, not {self.rope.dim or self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Sparse attention: a small scorer picks the ``top`` tokens each token may see.

    ``source`` is the layer whose choice a layer without a scorer of its own takes over.
    """

    num_heads: int
    head_dim: int
    top: int
    rope_interleaved: bool
    source: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads from one short vector a token.

    ``rope.dim`` channels of a head carry the position, ``nope_dim`` do not. ``query_rank`` None projects queries
    directly.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    bias: bool = False
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """A gated delta network: a matrix a head that each token fades, corrects and reads.

    ``fused`` checkpoints keep queries, keys, values and gates in one projection, grouped by key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2: a state a head that decays by a learned, input-dependent step."""

    num_heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    conv_bias: bool
    bias: bool
    step_limit: tuple[float, float] = (0.0, float("inf"))


# -- feed-forward parts ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Two projections and an activation; ``gated`` has a third that multiplies."""

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts.

    The router scores by ``score``, from float32 inputs with ``wide_router`` (a sigmoid always does); ``correction``
    adds a bias to the scores for choosing alone; with ``groups`` only the experts of the best ``kept_groups`` are
    candidates, a group counting as much as its best ``group_top`` together. The weights are normalised if
    ``norm_topk_prob`` and multiplied by ``scale``; ``weigh_input`` puts them on what goes into an expert instead of on
    what comes out. ``interleaved`` experts alternate gate and up. ``latent`` is the width experts work in where that
    is not the model's. ``shared`` is an MLP every token goes through, behind a sigmoid of its own with
    ``shared_gate``.
    """

    num_experts: int
    experts_per_token: int
    size: int
    norm_topk_prob: bool
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    scale: float = 1.0
    weigh_input: bool = False
    wide_router: bool = False
    router_bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    expert_bias: bool = False
    interleaved: bool = False
    latent: int | None = None
    latent_bias: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False


# -- the whole ------------------------------------------------------------------------------

Mixer = AttentionSpec | MlaSpec | DeltaSpec | MambaSpec
FeedForward = MlpSpec | MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, a feed-forward part, or both; ``post_norms`` normalises what each gives as well."""

    mixer: Mixer | None
    ffn: FeedForward | None
    post_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer. ``eos_token_ids`` are the tokens that end a response.

    ``norm_offset`` is added to every norm's weight. ``embedding_scale`` multiplies what the embedding gives;
    ``logit_softcap`` bounds logits smoothly.
    """

    family: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending; empty for a dense model."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    @property
    def moe(self) -> MoeSpec | None:
        """What the layers with experts have in common: how many, and how many a token."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeSpec)), None)

    @property
    def recurrent(self) -> bool:
        """Does a layer keep a state that cannot be cut at a token? Such prefixes cannot be shared by page."""
        return any(isinstance(layer.mixer, DeltaSpec | MambaSpec) for layer in self.layers)
