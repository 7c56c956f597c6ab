"""Decoder specs: every architecture parameter that the one decoder implementation needs.

A decoder is a tuple of layers. A layer has a mixer (attention or a recurrent layer), a feed-forward part, or both;
every kind of either has a frozen spec here and a module in ``layers``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.kernels.activation_kinds import ActivationKind
from miles.models.residual_spec import AltUpSpec, GatedResidualSpec, HyperConnectionSpec, NgramSpec
from miles.models.vision.spec import VisionSpec
from miles.precision.formats import QuantizationSpec

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
Activation = ActivationKind
LayerPart = Literal["mixer", "ffn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """RoPE: the base, the rotated channels, and the scaling for long contexts.

    The first ``dim`` channels of a head are rotated (None: all); ``interleaved`` pairs neighbours instead of halves.
    ``scale`` multiplies cos and sin. ``original_max_positions`` is the context length before extension, used by every
    kind except ``default`` and ``linear``. ``dynamic`` rescales only beyond it. ``longrope`` divides the frequencies by
    ``short_factors``, or by ``long_factors`` if the decoder's ``max_positions`` exceeds it. ``proportional`` has the
    frequencies of the whole head, of which the first ``rotated_pairs`` rotate and the others are zero.

    ``mrope_section`` (multimodal RoPE) is how many pairs of channels are rotated by a token's position in time, height
    and width: one section after the other, or with ``mrope_interleaved`` every third pair as long as a section lasts,
    and time beyond. Without it, and for tokens whose three positions are equal, RoPE is the plain one.

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
    rotated_pairs: int = 0
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = False

    def mrope_axes(self) -> tuple[int, ...]:
        """The axis (0 time, 1 height, 2 width) whose position rotates each pair of channels.

        >>> RopeSpec(theta=1e4, mrope_section=(2, 1, 1)).mrope_axes()
        (0, 0, 1, 2)
        >>> RopeSpec(theta=1e4, mrope_section=(2, 1, 1), mrope_interleaved=True).mrope_axes()
        (0, 1, 2, 0)
        """
        assert self.mrope_section is not None
        time, height, width = self.mrope_section
        if not self.mrope_interleaved:
            return (0,) * time + (1,) * height + (2,) * width
        pairs = range(time + height + width)
        return tuple(i % 3 if i < 3 * self.mrope_section[i % 3] else 0 for i in pairs)


# -- mixers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexerSpec:
    """Block-sparse attention: small heads select the ``top`` blocks of ``block`` tokens that each key-value head sees.

    There is one indexer head of ``head_dim`` channels for each key-value head. The ``local`` last blocks are always
    selected.
    """

    head_dim: int
    block: int
    top: int
    local: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolIndexerSpec:
    """Sparse attention by pools of tokens (QSA): small heads select ``top`` tokens, in pools of ``pool`` of them.

    A pool's key is the mean of its tokens' keys, normalized and rotated as its first token. All heads attend to the
    same tokens, and always to those behind the last complete pool.
    """

    num_heads: int
    head_dim: int
    top: int
    pool: int

    def __post_init__(self) -> None:
        if self.top % self.pool:
            raise ValueError(f"{self.top} selected tokens are not a multiple of the {self.pool} of a pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Softmax attention with grouped queries.

    ``rope`` None is a layer without position embedding. ``qk_norm`` is the QK-norm before RoPE: per head, or over all
    heads; ``head_after_rope`` is per head and after RoPE, ``unit`` the same without weights. ``window`` is the sliding
    window, the token itself included; ``chunk`` restricts attention to blocks of positions. ``scale`` None is
    ``head_dim ** -0.5``. ``gated`` multiplies the output by a sigmoid gate from the query projection; ``head_gate`` by
    one number for each head, from a projection of its own. ``temperature`` (floor, slope and, if not one, how many
    positions ahead of a multiple of the floor) scales queries with their position. ``value_norm`` normalizes the values
    of each head, without weights. ``value_from_key``: there is no value projection, and values are projected keys,
    before their norm and RoPE. ``ignores_spans``: tokens of an image attend causally in this layer, in a model where
    they attend in both directions elsewhere. ``kv_source`` is the earlier layer whose keys and values this layer
    attends to, after their norm and RoPE; it then projects queries only. ``indexer`` restricts attention to blocks or
    pools of tokens that it selects.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qk_norm: Literal["none", "head", "all", "head_after_rope", "unit"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    gated: bool = False
    head_gate: bool = False
    temperature: tuple[float, float] | tuple[float, float, float] | None = None
    value_norm: bool = False
    value_from_key: bool = False
    ignores_spans: bool = False
    kv_source: int | None = None
    indexer: BlockIndexerSpec | PoolIndexerSpec | None = None

    def __post_init__(self) -> None:
        if self.indexer is not None and (self.rope is None or self.kv_source is not None or self.window or self.chunk):
            raise ValueError("sparse attention needs RoPE, its own keys and values, and no window or chunk")
        is_gated = self.gated or self.head_gate
        if self.kv_source is not None and (is_gated or self.qk_norm not in ("none", "head") or self.temperature):
            raise ValueError("attention to another layer's keys and values has no gate, and at most QK-norm per head")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} key-value heads")
        if self.gated and (self.value_from_key or self.head_gate):
            raise ValueError("attention whose values are its keys, or with a gate for each head, has no other gate")
        if self.rope is not None and (self.rope.dim or self.head_dim) % 2:
            raise ValueError(f"RoPE needs an even number of channels, not {self.rope.dim or self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeAttentionSpec:
    """Softmax attention with a relative position bias in place of RoPE, and short convolutions of keys and values.

    A score is the scaled product of a normalized query and key plus the bias of their distance: each head of a token
    projects to ``rank`` weights, which mix as many learned profiles over distances below ``extent``; beyond it the bias
    is zero. Keys (before their norm) and values are the sum of their projection and a convolution of ``kernel`` taps of
    it. ``temperature`` (floor, slope) multiplies scores by one plus slope times the logarithm of the number of tokens
    so far over ``floor``, from there on.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rank: int
    extent: int
    kernel: int
    window: int | None = None
    temperature: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} key-value heads")
        if self.kernel < 2 or self.extent < 1:
            raise ValueError("a short convolution has at least two taps, and a position bias one distance")

    @property
    def kv_channels(self) -> int:
        """Channels that are convolved: those of keys and of values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """DSA indexer: selects the ``top`` tokens that each token attends to.

    ``source`` is the layer whose selection is reused by a layer without its own indexer. With a ``pool`` above one it
    selects pools of so many consecutive tokens, and always the tokens behind the last complete one.
    """

    num_heads: int
    head_dim: int
    top: int
    rope_interleaved: bool
    source: int | None = None
    pool: int = 1

    def __post_init__(self) -> None:
        if self.top % self.pool:
            raise ValueError(f"{self.top} selected tokens are not a multiple of the {self.pool} of a pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: keys and values of all heads from one latent vector per token.

    ``rope_dim`` channels of a head are rotated, ``nope_dim`` are not. ``query_rank`` None projects queries directly.
    ``temperature`` scales queries with their position, as in ``AttentionSpec``.
    ``rope`` None is a layer without position embedding, whose ``rope_dim`` channels of the key are still shared by all
    heads; there may be none of them. Its indexer has no position embedding either.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    scale: float
    bias: bool = False
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None
    temperature: tuple[float, float, float] | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowIndexerSpec:
    """Indexer of a compressor's windows: small heads select the ``top`` windows that each token attends to.

    It has a compressor of its own over the same windows, whose keys have ``head_dim`` channels.
    """

    num_heads: int
    head_dim: int
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorSpec:
    """Compressor: one key for each window of ``rate`` tokens, a weighted mean of what these project.

    With ``overlap`` (CSA) a window also reads the tokens of the window before it, by channels of their own; without
    (HCA) it reads its own only. ``indexer`` None: a token attends to all windows that are complete.
    """

    rate: int
    overlap: bool
    indexer: WindowIndexerSpec | None = None

    def state_dim(self, head_dim: int) -> int:
        """Channels of what a token adds to windows: values and gates, of the indexer's compressor too."""
        width = head_dim + (0 if self.indexer is None else self.indexer.head_dim)
        return 2 * width * (2 if self.overlap else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec:
    """Attention to a sliding window of tokens, and to compressed keys of all earlier ones if there is a compressor.

    One head of keys, which are the values too, is shared by all query heads. RoPE rotates the last channels of a head,
    and those of the output back. The output of each of ``output_groups`` groups of heads is projected to
    ``output_rank`` channels, and all of these together to the hidden size. Every head has an attention sink.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    rope: RopeSpec
    window: int
    output_groups: int
    output_rank: int
    compressor: CompressorSpec | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.output_groups:
            raise ValueError(f"{self.num_heads} heads are not a multiple of {self.output_groups} output groups")
        if self.rope.dim is None or self.rope.dim >= self.head_dim or self.rope.dim % 2:
            raise ValueError(f"RoPE must rotate an even part of the {self.head_dim} channels, not {self.rope.dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetSpec:
    """Gated DeltaNet: one state matrix per head, updated by the gated delta rule.

    ``fused`` checkpoints have queries, keys, values and gates in one projection, grouped by key head. ``output_gate``
    is the activation of the gates.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool
    output_gate: Literal["silu", "sigmoid"] = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """Kimi Delta Attention (KDA): one state matrix per head, whose rows each decay by a factor of their own.

    Decays and output gates come from projections of rank ``head_dim``. ``lower_bound`` is the least logarithm of a
    decay, which is then a sigmoid between it and zero. ``flat_rates``: the checkpoint has the rates of decay (A_log) as
    a vector.
    """

    num_heads: int
    head_dim: int
    kernel: int
    lower_bound: float | None = None
    flat_rates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2: one state per head that decays by a learned, input-dependent time step."""

    num_heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    conv_bias: bool
    bias: bool
    step_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Gated short convolution: ``kernel`` taps for each of ``channels``, between a gate on its input and one on its
    output. ``bias`` is for the convolution and both projections.
    """

    channels: int
    kernel: int
    bias: bool = False


# -- feed-forward ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Up and down projections with an activation; ``gated`` adds a gate projection.

    ``sparsity`` (activation sparsity) subtracts a cutoff from a token's gates and zeroes those below it: the quantile
    of that order of a normal distribution with their mean and variance. 0 is none. ``interleaved`` alternates gate and
    up rows. ``learned_scale`` multiplies the output by a learned number.
    """

    size: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    sparsity: float = 0.0
    interleaved: bool = False
    learned_scale: bool = False

    def __post_init__(self) -> None:
        if self.interleaved and (not self.gated or self.sparsity):
            raise ValueError("interleaved rows are for a gated MLP without activation sparsity")
        if not 0 <= self.sparsity < 1 or (self.sparsity and not self.gated):
            raise ValueError("activation sparsity is at least 0, below 1, and for a gated MLP")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts.

    The router scores by ``score``, in float32 with ``wide_router`` (all but a softmax always do); ``correction`` adds a
    bias to the scores for the selection only; with ``groups`` only experts of the best ``kept_groups`` groups are
    candidates, a group being scored by the sum of its best ``group_top`` experts. The weights are normalized if
    ``norm_topk_prob`` and multiplied by ``scale``; ``weigh_input`` applies them to the experts' inputs instead of their
    outputs. ``interleaved`` experts alternate gate and up rows. ``latent`` is the experts' input width if it is not the
    model's. ``shared`` is an MLP applied to every token, with a sigmoid gate if ``shared_gate``.

    With ``hash_vocab`` (hash routing) the experts of a token are looked up by its id in a table of so many tokens,
    which is not trained; the router's scores only weigh them.

    Besides ``shared`` there may be ``weighed_shared`` experts of every token: the router has a row for each, and weighs
    them together with the selected ones; all weights are then multiplied by a learned number, too.

    With ``beside_mlp`` (Gemma 4) the experts are a branch beside ``shared``: they read the residual stream through a
    norm of their own, and each branch has a norm behind it. The router reads the residual stream too, normalized, times
    a learned scale of each channel, over the root of their number; the weight of an expert is multiplied by a learned
    scale.
    """

    num_experts: int
    experts_per_token: int
    size: int
    norm_topk_prob: bool
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
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
    beside_mlp: bool = False
    hash_vocab: int = 0
    weighed_shared: int = 0

    def __post_init__(self) -> None:
        is_plain = self.gated and not (self.latent or self.expert_bias or self.router_bias or self.weigh_input)
        if self.weighed_shared and not (is_plain and self.score == "sigmoid" and self.norm_topk_prob):
            raise ValueError("shared experts are weighed by a router of normalized sigmoids, and are plain gated ones")
        if self.weighed_shared and (self.shared is not None or self.groups > 1 or self.hash_vocab):
            raise ValueError("shared experts that the router weighs go with no other ones, groups or hash routing")
        if self.hash_vocab and (self.correction or self.groups > 1):
            raise ValueError("hash routing looks experts up, and has neither a correction bias nor groups of experts")
        if self.beside_mlp and (self.shared is None or self.latent is not None or self.weigh_input):
            raise ValueError("experts beside an MLP need that MLP, and neither a latent width nor weighted inputs")


# -- the decoder ----------------------------------------------------------------------------

RecurrentMixer = GatedDeltaNetSpec | KimiDeltaSpec | MambaSpec | ShortConvSpec
Mixer = AttentionSpec | RelativeAttentionSpec | MlaSpec | CompressedAttentionSpec | RecurrentMixer
FeedForward = MlpSpec | MoeSpec


def is_sparse(mixer: Mixer | None) -> bool:
    """Return whether an indexer selects which earlier tokens a layer attends to."""
    return isinstance(mixer, AttentionSpec | MlaSpec) and mixer.indexer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: a mixer, a feed-forward part, or both; ``post_norms`` also normalizes the output of each.

    ``output_scale`` multiplies the residual stream behind the layer by a number of the checkpoint that is not trained.
    ``per_layer_size`` is the width of the layer's own input (``PerLayerInputSpec``), 0 if it has none. ``hyper`` are
    the hyper-connections of a decoder with several residual streams. ``laurel_rank`` (LAuReL) is the rank of a learned
    residual connection beside the mixer, 0 if there is none. Layers with ``altup`` have a mixer and an MLP with norms
    on both sides, a learned residual and an input of their own. ``ngram`` are n-gram embeddings in front of the mixer.
    To the output of the mixer and of the feed-forward part its short convolution of ``output_kernel`` taps is added, 0
    if there is none.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    post_norms: bool = False
    output_scale: bool = False
    per_layer_size: int = 0
    hyper: HyperConnectionSpec | GatedResidualSpec | None = None
    laurel_rank: int = 0
    altup: AltUpSpec | None = None
    ngram: NgramSpec | None = None
    output_kernel: int = 0

    @property
    def has_norms(self) -> bool:
        """Whether there is a norm in front of each part, beside that of gated hyper-connections."""
        return not isinstance(self.hyper, GatedResidualSpec)

    def __post_init__(self) -> None:
        if self.ngram is not None and (self.hyper is None or not isinstance(self.mixer, RecurrentMixer)):
            raise ValueError("n-gram embeddings are in front of a recurrent layer with hyper-connections")
        if self.output_kernel and (self.hyper is not None or self.altup is not None):
            raise ValueError("a layer with several residual streams has no convolutions behind its parts")
        if self.hyper is not None and (self.post_norms or self.output_scale or self.per_layer_size):
            raise ValueError("a layer with hyper-connections has no post norms, output scale or input of its own")
        has_parts = self.mixer is not None and isinstance(self.ffn, MlpSpec) and self.post_norms
        is_whole = has_parts and self.per_layer_size > 0 and self.laurel_rank > 0 and not self.output_scale
        if (self.altup is not None and not is_whole) or (self.laurel_rank and self.altup is None):
            raise ValueError(
                "AltUp and a learned residual go together, with a mixer, an MLP, post norms and per-layer inputs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputSpec:
    """Per-layer embeddings: an input of ``size`` channels for each layer, from the token and from its embedding.

    Placeholders of images have the embedding of ``pad_token_id`` in the table of ``vocab_size`` tokens. It is not
    trained; None is a model of text. Tokens beyond the table have the embedding of ``beyond_token_id``; None: all are
    in it.
    """

    size: int
    vocab_size: int
    pad_token_id: int | None = None
    beyond_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """LoRA adapters that a decoder applies beside its weights: the modules that have them, by checkpoint names.

    ``shared_outer`` and ``use_rslora`` as in ``lora.targets.LoraSpec``.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    shared_outer: bool = False
    use_rslora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder-only transformer. ``eos_token_ids`` are the tokens that end a response.

    ``norm_offset`` is added to every norm's weight. ``embedding_scale`` multiplies the embedding; ``logit_softcap``
    soft-caps the logits. ``quantization`` says which weights are quantized; None is none of them. ``adapters`` are LoRA
    factors that the decoder holds as parameters of its own. ``vision`` is the tower of a vision-language model.
    ``per_layer_input`` are embeddings that every layer reads (its ``per_layer_size`` says so too). ``altup`` are the
    residual streams, if there are several (every layer says so too). ``embedding_norm``: the embedding is normalized.
    ``output_divisor`` divides hidden states behind the last norm. Behind the rows of the vocabulary the embedding and
    the output weight have ``vocab_padding`` further ones, which are no tokens and have no logits.
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
    quantization: QuantizationSpec | None = None
    adapters: AdapterSpec | None = None
    vision: VisionSpec | None = None
    per_layer_input: PerLayerInputSpec | None = None
    altup: AltUpSpec | None = None
    embedding_norm: bool = False
    output_divisor: float = 1.0
    vocab_padding: int = 0

    def __post_init__(self) -> None:
        self._check_kv_sources()
        if len({layer.hyper for layer in self.layers}) > 1 or (self.streams > 1 and self.vision is not None):
            raise ValueError("all layers have the same hyper-connections, in a model without a vision tower")
        if any(layer.altup != self.altup for layer in self.layers):
            raise ValueError("all layers must have the residual streams of the decoder")
        if self.vision is None or not self.vision.bidirectional_spans:
            return
        for number, layer in enumerate(self.layers):
            mixer = layer.mixer
            if mixer is None:
                continue
            if not isinstance(mixer, AttentionSpec) or mixer.sinks or mixer.softcap is not None or mixer.chunk:
                raise ValueError(
                    f"images attend in both directions, which layer {number} does not support: it must be attention "
                    "without sinks, soft-capping and chunks"
                )

    def _check_kv_sources(self) -> None:
        for number, layer in enumerate(self.layers):
            mixer = layer.mixer
            if not isinstance(mixer, AttentionSpec) or mixer.kv_source is None:
                continue
            source = self.layers[mixer.kv_source].mixer if 0 <= mixer.kv_source < number else None
            heads = (mixer.num_kv_heads, mixer.head_dim, None)
            if (
                not isinstance(source, AttentionSpec)
                or (source.num_kv_heads, source.head_dim, source.kv_source) != heads
            ):
                raise ValueError(
                    f"layer {number} attends to the keys and values of layer {mixer.kv_source}, which must be an "
                    "earlier layer with keys and values of its own and the same heads"
                )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding."""
        return self.vocab_size + self.vocab_padding

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending; empty for a dense model."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    @property
    def moe(self) -> MoeSpec | None:
        """The first MoE layer's spec, for what all have in common; None for a dense model."""
        return next((layer.ffn for layer in self.layers if isinstance(layer.ffn, MoeSpec)), None)

    @property
    def hyper(self) -> HyperConnectionSpec | GatedResidualSpec | None:
        """The hyper-connections that all layers have; None if there are none."""
        return next((layer.hyper for layer in self.layers), None)

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm behind the last layer, beside that of gated hyper-connections."""
        return not isinstance(self.hyper, GatedResidualSpec)

    @property
    def has_ngrams(self) -> bool:
        """Whether a layer has n-gram embeddings."""
        return any(layer.ngram is not None for layer in self.layers)

    @property
    def hashes_tokens(self) -> bool:
        """Whether a layer looks experts or n-grams up by the ids of tokens."""
        return self.has_ngrams or any(isinstance(layer.ffn, MoeSpec) and layer.ffn.hash_vocab for layer in self.layers)

    @property
    def streams(self) -> int:
        """The number of residual streams, which is one unless layers have hyper-connections."""
        return max((layer.hyper.streams for layer in self.layers if layer.hyper is not None), default=1)

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a recurrent state, which rules out prefix sharing by page."""
        stateful = RecurrentMixer | RelativeAttentionSpec
        return any(isinstance(layer.mixer, stateful) or layer.output_kernel for layer in self.layers)


def output_conv_state(spec: DecoderSpec, layer: int, part: LayerPart) -> int:
    """Return the number of the recurrent state of the convolution behind a part of a layer.

    The states of mixers have the numbers of their layers; those of these convolutions follow.
    """
    return spec.num_layers * (1 if part == "mixer" else 2) + layer
