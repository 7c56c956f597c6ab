"""Tensors that autograd saves in a layer until its backward pass, in bytes per token, from the spec. No torch.

Counted module by module: norms, mixers, MLPs and experts, residual streams. On an accelerator norms, gates and
attention are fused kernels and save less (``fused``), and in half precision so is what lies between a projection and
attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from miles.kernels.activation_kinds import is_limited
from miles.models.accounting.params import CHUNK
from miles.models.residual_spec import GatedResidualSpec, HyperConnectionSpec, NgramSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    CompressorSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RecurrentMixer,
    RelativeAttentionSpec,
    ShortConvSpec,
)

__all__ = ["ContextScan", "SavedBytes"]


class ContextScan(NamedTuple):
    """How recurrent layers scan under context parallelism: each of ``ranks`` chunks of ``chunk`` tokens (None: whole
    sequences alone), and ``uneven`` times its own tokens more where whole sequences do not fit evenly.
    """

    ranks: int = 1
    chunk: int | None = None
    uneven: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes per token saved by each module, in a model of ``size`` bytes per value; every input of linear layers once.

    ``frozen``: norms are not trained. ``longest`` is the longest sequence, and ``tokens`` those of a micro-batch.
    """

    size: int
    fused: bool
    offset: bool
    sequence: int = 1
    frozen: bool = False
    longest: int = 0
    tokens: int = 0

    @property
    def triton_training(self) -> bool:
        """Whether the Triton training kernels are used."""
        return self.fused and self.size < 4

    def numbers(self, count: float) -> float:
        return count * self.size

    def norm(self, width: int) -> float:
        """Its input and its output, and if it is trained and not fused the normalized but unscaled values."""
        between = 0 if self.fused or self.frozen else width
        # The input of a layer's part has all tokens; the norm's input and output have this rank's tokens.
        if self.sequence > 1:
            return self.numbers(width) + (self.numbers(2 * width + between) + 4.0) / self.sequence
        if self.offset and self.size < 4 and not self.triton_training:
            return self.numbers(width) + 4.0 * (width + between)
        return self.numbers(2 * width + between) + 4.0

    def post_norm(self, width: int) -> float:
        """A norm whose output is only added: its input, and the normalized values."""
        wide = 4 if self.offset and not self.triton_training else self.size
        return (float(width * (wide if self.fused or self.frozen else 2 * wide)) + 4.0) / self.sequence

    def attention(self, spec: AttentionSpec) -> float:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        both = queries + keys
        if spec.kv_source is not None:  # the source's keys and values are saved there
            saved = 3 * queries if spec.qk_norm == "head" and not self.frozen else 2 * queries
            return self.numbers(saved) + self._attention_output(spec.num_heads, queries)
        gate = self.numbers(queries + spec.num_heads) if spec.head_gate else 0.0
        if self.fuses_attention(spec):
            # Queries, keys and values as attention takes them, and the projection output if QK-norm needs it.
            made = 2 if spec.qk_norm == "head" else 1
            return self.numbers(made * (queries + 2 * keys)) + self._attention_output(spec.num_heads, queries) + gate
        total = self.numbers(queries * (2 if spec.gated else 1) + 2 * keys)
        if spec.gated:
            # Queries and keys side by side, unless their norm copies them; the sigmoid and, if not fused, its input.
            is_copied = self.triton_training and self.offset and spec.qk_norm == "head"
            total += self.numbers((0 if is_copied else both) + (2 if self.triton_training else 3) * queries)
        total += self._qk_norm(spec, both)
        if spec.rope is not None:  # a norm behind it saves what is rotated, beside its own output
            total += self.numbers(both) * (2 if spec.qk_norm == "head_after_rope" else 1)
        if spec.temperature is not None:
            total += self.numbers(queries)
        if spec.value_norm:
            total += self.numbers(0 if spec.value_from_key else keys)
        return total + self._attention_output(spec.num_heads, queries) + gate

    def _qk_norm(self, spec: AttentionSpec, both: int) -> float:
        """What normalizing queries and keys saves beside the projection: normalized values that are then scaled.

        A weight with an offset is float32, and so are they and, of a fused norm, what it normalizes. Norms of all
        heads together are kernels that save their input only.
        """
        if spec.qk_norm == "none" or self.frozen or (spec.qk_norm == "all" and self.triton_training):
            return 0.0
        wide = self.offset and self.size < 4
        return self.numbers(both) * ((4 if self.fused else 2) if wide else 1)

    def fuses_attention(self, spec: AttentionSpec) -> bool:
        """Whether one kernel computes what is between the projection and attention."""
        is_plain = not (spec.gated or spec.value_norm or spec.value_from_key) and spec.temperature is None
        is_plain &= spec.indexer is None and spec.kv_source is None
        return self.triton_training and is_plain and spec.qk_norm in ("none", "head")

    def _attention_output(self, heads: int, width: int) -> float:
        return self.numbers(width) + 4.0 * heads

    def relative_attention(self, spec: RelativeAttentionSpec) -> float:
        """The output of the projection, keys and values convolved, queries and keys normalized, the bias's weights."""
        queries, keys = spec.num_heads * spec.head_dim, spec.kv_channels // 2
        between = 0 if self.fused or self.frozen else queries + keys
        total = self.numbers(2 * queries + 5 * keys + between + spec.num_heads * spec.rank)
        return total + self.conv(spec.kv_channels) + self._attention_output(spec.num_heads, queries)

    def conv(self, channels: int) -> float:
        """The input of a convolution in float32, and once more with room for what is before each sequence."""
        return 8.0 * channels

    def mla(self, spec: MlaSpec) -> float:
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
        total = self.norm(spec.kv_rank) + self.numbers(spec.rope_dim)
        if spec.query_rank is not None:
            total += self.norm(spec.query_rank)
        expanded = spec.num_heads * (spec.nope_dim + spec.value_dim)
        if self.triton_training and spec.head_dim == spec.value_dim:
            # Values are a view of what keys are made of, and the output is one tensor.
            return total + self.numbers(2 * queries + expanded) + self._attention_output(spec.num_heads, values)
        total += self.numbers(2 * queries + expanded + values)
        return total + self._attention_output(spec.num_heads, values)

    def compressed_attention(self, spec: CompressedAttentionSpec) -> float:
        """Queries before their norm and rotated, keys rotated, the output in groups, and what each projects to."""
        queries, outputs = spec.num_heads * spec.head_dim, spec.output_groups * spec.output_rank
        total = self.norm(spec.query_rank) + self.norm(spec.head_dim) + 4.0 * spec.num_heads
        total += self.numbers(3 * queries + outputs + 2 * (spec.rope.dim or 0))
        total += self._attention_output(spec.num_heads, queries)
        return total if spec.compressor is None else total + self.compressor(spec.compressor, spec.head_dim)

    def compressor(self, spec: CompressorSpec, width: int) -> float:
        """What a token adds to windows, its weights in float32, the windows' keys, and those selected for it."""
        reads = 2 if spec.overlap else 1
        weights = reads * width * (4.0 if self.size == 4 else 4.0 + self.size)
        selected = 0.0 if spec.indexer is None else 4.0 * spec.indexer.top
        return self.numbers(2 * width + 4 * width / spec.rate) + weights + 8.0 * reads + selected

    def delta(self, spec: GatedDeltaNetSpec) -> float:
        """Projections and convolution in the model's precision; the chunked recurrence in float32."""
        heads = spec.value_heads
        keys = spec.key_heads * spec.key_dim
        values = spec.value_heads * spec.value_dim
        channels, wide_keys = 2 * keys + values, heads * spec.key_dim
        chunk = 6 * heads * CHUNK + 3 * (wide_keys + values) + 4 * keys + 4 * wide_keys + 2 * values
        states = 2 * heads * spec.key_dim * spec.value_dim / CHUNK
        wide = channels + 2 * keys + chunk + states + 3 * values
        return self.numbers(3 * channels + 2 * values) + 4.0 * wide

    def kda(self, spec: KimiDeltaSpec) -> float:
        """Projections and convolution in the model's precision; the chunked recurrence in float32 and float64."""
        heads, inner = spec.num_heads, spec.num_heads * spec.head_dim
        states = 2 * inner * spec.head_dim / CHUNK
        wide = 25 * inner + (3 * CHUNK + 4) * heads + states
        return self.numbers(10 * inner + 2 * spec.head_dim) + 4.0 * wide

    def mamba(self, spec: MambaSpec) -> float:
        """Likewise for the SSD scan."""
        heads = spec.num_heads
        inner = spec.num_heads * spec.head_dim
        both = spec.groups * spec.state_dim
        channels = inner + 2 * both
        chunk = 2 * heads * CHUNK + spec.groups * CHUNK + 4 * both + 4 * inner
        # Behind each chunk, and once more all together.
        states = 2 * heads * spec.head_dim * spec.state_dim / CHUNK
        wide = channels + inner + chunk + states + 5 * inner
        return self.numbers(3 * channels + 2 * inner + heads) + 4.0 * wide

    def short_conv(self, spec: ShortConvSpec) -> float:
        """The projection, the convolution's input and output, and the gated output."""
        return self.numbers(6 * spec.channels)

    def context_scan(self, mixer: Mixer, scan: ContextScan) -> float:
        """Per token of a rank what context parallelism adds to a recurrent layer: other ranks' tokens, or states."""
        if not isinstance(mixer, RecurrentMixer):
            return 0.0
        # Chunks are of split sequences, which make a batch even.
        passed = 0.0 if scan.chunk is None else self._passed_on(mixer, scan.ranks, scan.chunk)
        return max(scan.uneven * self._scan(mixer), passed)

    def _scan(self, mixer: RecurrentMixer) -> float:
        """What a layer saves without its projections, gate and norm."""
        match mixer:
            case GatedDeltaNetSpec():
                keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
                return self.delta(mixer) - self.numbers(2 * keys + 3 * values) - 4.0 * 3 * values
            case KimiDeltaSpec():
                inner = mixer.num_heads * mixer.head_dim
                return self.kda(mixer) - self.numbers(4 * inner + 2 * mixer.head_dim) - 4.0 * 3 * inner
            case MambaSpec():
                inner, both = mixer.num_heads * mixer.head_dim, mixer.groups * mixer.state_dim
                return self.mamba(mixer) - self.numbers(3 * inner + 2 * both) - 4.0 * 5 * inner
            case ShortConvSpec():
                return self.numbers(2 * mixer.channels)

    def _passed_on(self, mixer: RecurrentMixer, ranks: int, chunk: int) -> float:
        """The columns by which outputs depend on the state before a chunk, and the states of all ranks' chunks."""
        copies = (2 * ranks + 4) / chunk
        match mixer:
            case GatedDeltaNetSpec():
                keys = mixer.value_heads * mixer.key_dim
                return 4.0 * keys * (5 + copies * (mixer.key_dim + mixer.value_dim))
            case KimiDeltaSpec():
                return 4.0 * mixer.num_heads * mixer.head_dim * (5 + copies * 2 * mixer.head_dim)
            case MambaSpec():
                return 4.0 * mixer.num_heads * mixer.head_dim * (2 + copies * mixer.state_dim)
            case ShortConvSpec():
                return 0.0

    def mlp(self, spec: MlpSpec) -> float:
        return self.numbers(self.inner(spec))

    def inner(self, spec: MlpSpec | MoeSpec) -> int:
        """What an MLP (or an expert) saves between its two projections; the clamped SwiGLU is one function."""
        sparse = 1 if isinstance(spec, MlpSpec) and spec.sparsity else 0
        is_fused = spec.gated and self.triton_training and not sparse
        if spec.activation == "swiglu_clamped" or is_limited(spec.activation) or is_fused:
            return 3 * spec.size
        return spec.size * (4 + sparse if spec.gated else 2)

    def moe(self, spec: MoeSpec, width: int) -> float:
        inner = spec.latent or width
        rows = self.numbers(2 * inner + self.inner(spec))
        total = spec.experts_per_token * (rows + 8 * 5) + 4.0 * spec.num_experts
        if self.size < 4 and not self.frozen and (spec.score != "softmax" or spec.wide_router):
            total += 4.0 * width  # its input in float32, in which the router computes
        if spec.shared is not None:
            total += self.mlp(spec.shared) + (self.numbers(width) if spec.shared_gate else 0)
        if spec.weighed_shared:  # what each computes, once more when weighed, and the weights
            total += spec.weighed_shared * (self.numbers(self.inner(spec) + spec.size) + 4.0 * 5)
        if spec.beside_mlp:
            # The norms in front of the router, twice scaled, and of the experts, and those behind both branches.
            total += self.numbers(2 * width) + self.norm(width) + 2 * self.post_norm(width)
        return total + (self.numbers(inner + width) if spec.latent else 0)

    def per_layer_input(self, size: int, width: int) -> float:
        """The layer's own input and how it was computed, the gate's input and the activation, and a norm."""
        return self.numbers(width + 7 * size) + self.post_norm(width)

    def hyper_connection(self, spec: HyperConnectionSpec, width: int) -> float:
        """The streams, the output that joins them, and the weights of a token."""
        weights = spec.num_weights * (4.0 if self.size == 4 else 4.0 + self.size)
        return self.numbers((spec.streams + 1) * width) + weights

    def gated_residual(self, spec: GatedResidualSpec, width: int) -> float:
        """The streams, what is read of them, the output that joins them and its weights."""
        return self.numbers((spec.streams + 2) * width + spec.streams)

    def ngram(self, spec: NgramSpec, streams: int, width: int) -> float:
        """Embeddings and their rows; keys, queries and what is convolved, with their norms; gates and values."""
        wide = 4.0 * 4 * streams * width if self.size < 4 else 0.0
        kept = 8 if self.frozen else 11
        return self.numbers(spec.dim + width + kept * streams * width + 6 * streams) + 8.0 * len(spec.head_sizes) + wide

    def altup(self, streams: int, rank: int, width: int) -> float:
        """The streams as they come, predicted and corrected; two routers, the change, and the learned residual."""
        routers = 4 * width + streams**2 + 3 * streams
        return self.numbers(3 * streams * width + width + routers + rank) + 8.0 + self.post_norm(width)

    def mixer(self, mixer: Mixer) -> float:
        match mixer:
            case AttentionSpec():
                return self.attention(mixer)
            case RelativeAttentionSpec():
                return self.relative_attention(mixer)
            case MlaSpec():
                return self.mla(mixer)
            case CompressedAttentionSpec():
                return self.compressed_attention(mixer)
            case GatedDeltaNetSpec():
                return self.delta(mixer)
            case KimiDeltaSpec():
                return self.kda(mixer)
            case MambaSpec():
                return self.mamba(mixer)
            case ShortConvSpec():
                return self.short_conv(mixer)

    def mixer_part(self, layer: LayerSpec, width: int) -> float:
        """A layer's mixer with its norms."""
        if layer.mixer is None:
            return 0.0
        total = self.norm(width) if layer.has_norms else 0.0
        return total + self.mixer(layer.mixer) + (self.post_norm(width) if layer.post_norms else 0.0)

    def ffn_part(self, layer: LayerSpec, width: int) -> float:
        """A layer's MLP or experts with their norms."""
        if layer.ffn is None:
            return 0.0
        total = self.norm(width) if layer.has_norms else 0.0
        total += self.post_norm(width) if layer.post_norms else 0.0
        total += self.mlp(layer.ffn) if isinstance(layer.ffn, MlpSpec) else self.moe(layer.ffn, width)
        is_scaled = isinstance(layer.ffn, MlpSpec) and layer.ffn.learned_scale
        return total + (self.numbers(width) if is_scaled else 0.0)

    def layer(self, layer: LayerSpec, width: int) -> float:
        total = self.per_layer_input(layer.per_layer_size, width) if layer.per_layer_size else 0.0
        if isinstance(layer.hyper, GatedResidualSpec):
            total += 2 * self.gated_residual(layer.hyper, width)
            total += 0.0 if layer.ngram is None else self.ngram(layer.ngram, layer.hyper.streams, width)
        elif layer.hyper is not None:
            total += 2 * self.hyper_connection(layer.hyper, width)
        if layer.altup is not None:
            total += self.altup(layer.altup.streams, layer.laurel_rank, width)
        total += self.mixer_part(layer, width) + self.ffn_part(layer, width)
        if layer.output_kernel:
            parts = sum(part is not None for part in (layer.mixer, layer.ffn))
            total += parts * self.conv(width)
        return total
