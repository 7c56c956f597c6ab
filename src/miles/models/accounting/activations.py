"""Activation memory of a training step: what autograd saves of a micro-batch until backward, from the spec. No torch.

Counted are the saved tensors, module by module, in values per token. The peak is either at the end of the forward
pass, when the logits of some tokens exist, or in the backward pass of a layer, which frees what the layer saved as it
goes, and holds gradients meanwhile: of an MLP those of the activation's input and output, of experts those of a token's
rows. Where these are not derived they are taken for one more of that part, and if a weight is quantized for what that
takes, where it is more.
On an accelerator norms, gates and attention are fused kernels and save less (``fused``), and in half precision so is
what lies between a projection and attention.

For a tensor-parallel model pass one rank's spec; the residual stream is replicated on each rank, unless sequence
parallelism shards its tokens over ``sequence`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from miles.kernels.activation_kinds import is_limited
from miles.models.accounting.linear_inputs import LayerAdapters, saved_input_bytes
from miles.models.accounting.params import CHUNK
from miles.models.accounting.quantize_workspace import quantize_workspace_bytes
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.targets import LoraSpec
from miles.models.quantization import quantizes_layer
from miles.models.residual_spec import GatedResidualSpec, HyperConnectionSpec, NgramSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    CompressorSpec,
    DecoderSpec,
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
from miles.precision.formats import QuantizationSpec

RecomputeMode = Literal["none", "selective", "full"]

# Logits of a chunk, by whether it is on an accelerator; the training kernels take twice as many there.
_CHUNK_LOGITS = {False: 1 << 24, True: 1 << 27}
MAX_KEPT_LOGIT_GRADS = 5 << 29
"""Gradients of logits that a step on an accelerator keeps in half precision; of more, logits are computed twice."""


class ContextScan(NamedTuple):
    """How recurrent layers scan under context parallelism: each of ``ranks`` chunks of ``chunk`` tokens (None: whole
    sequences alone), and ``uneven`` times its own tokens more where whole sequences do not fit evenly.
    """

    ranks: int = 1
    chunk: int | None = None
    uneven: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedBytes:
    """Bytes per token saved by each module, in a model of ``size`` bytes per value; every input of linear layers once.

    ``frozen``: norms are not trained.
    """

    size: int
    fused: bool
    offset: bool
    sequence: int = 1
    frozen: bool = False

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
            total += self.numbers(both + 3 * queries)
        if spec.qk_norm != "none" and not self.frozen:
            total += self.numbers(both) * (2 if self.offset and self.size < 4 else 1)
        if spec.rope is not None:  # a norm behind it saves what is rotated, beside its own output
            total += self.numbers(both) * (2 if spec.qk_norm == "head_after_rope" else 1)
        if spec.temperature is not None:
            total += self.numbers(queries)
        if spec.value_norm:
            total += self.numbers(0 if spec.value_from_key else keys)
        return total + self._attention_output(spec.num_heads, queries) + gate

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
        """The input of a convolution, in float32, once for all of its taps."""
        return 4.0 * channels

    def mla(self, spec: MlaSpec) -> float:
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
        total = self.norm(spec.kv_rank) + self.numbers(spec.rope_dim)
        if spec.query_rank is not None:
            total += self.norm(spec.query_rank)
        expanded = spec.num_heads * (spec.nope_dim + spec.value_dim)
        if self.triton_training and spec.indexer is None and spec.head_dim == spec.value_dim:
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
        chunk = 2 * heads * CHUNK + spec.groups * CHUNK + 6 * both + 4 * inner
        states = heads * spec.head_dim * spec.state_dim / CHUNK
        wide = channels + inner + chunk + states + 4 * inner
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
                return self.mamba(mixer) - self.numbers(3 * inner + 2 * both) - 4.0 * 4 * inner
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
        return self.numbers(self._inner(spec))

    def _inner(self, spec: MlpSpec | MoeSpec) -> int:
        """What an MLP (or an expert) saves between its two projections; the clamped SwiGLU is one function."""
        if spec.activation == "swiglu_clamped" or is_limited(spec.activation) or (spec.gated and self.triton_training):
            return 3 * spec.size
        sparse = 1 if isinstance(spec, MlpSpec) and spec.sparsity else 0
        return spec.size * (4 + sparse if spec.gated else 2)

    def moe(self, spec: MoeSpec, width: int) -> float:
        inner = spec.latent or width
        rows = self.numbers(2 * inner + self._inner(spec))
        total = spec.experts_per_token * (rows + 8 * 5) + 4.0 * spec.num_experts
        if self.size < 4 and not self.frozen and (spec.score != "softmax" or spec.wide_router):
            total += 4.0 * width  # its input in float32, in which the router computes
        if spec.shared is not None:
            total += self.mlp(spec.shared) + (self.numbers(width) if spec.shared_gate else 0)
        if spec.weighed_shared:  # what each computes, once more when weighed, and the weights
            total += spec.weighed_shared * (self.numbers(self._inner(spec) + spec.size) + 4.0 * 5)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gradients:
    """Bytes per token that a layer's backward pass holds at its widest, beyond all that the layer has saved.

    The gradient of the residual stream is there throughout, and tensors are freed once they have been used.
    """

    count: _SavedBytes
    width: int
    adapters: LayerAdapters | None

    def layer(self, layer: LayerSpec, saved: float) -> float:
        """Of a layer that has ``saved`` this much in all; the mixer's backward runs when all behind it is freed."""
        count, width = self.count, self.width
        has_streams = layer.hyper is not None or layer.altup is not None or layer.per_layer_size > 0
        if not count.triton_training or count.sequence > 1 or has_streams or layer.output_kernel:
            return saved + 2 * count.numbers(width)
        ffn = count.ffn_part(layer, width)
        return count.numbers(width) + max(self._ffn(layer, ffn), self._mixer(layer) - ffn)

    def _ffn(self, layer: LayerSpec, saved: float) -> float:
        ffn, count = layer.ffn, self.count
        if ffn is None or self._has_adapter("mlp.", "moe."):
            return saved
        if isinstance(ffn, MoeSpec):
            return self._moe(ffn, saved)
        if not ffn.gated or ffn.sparsity:
            return saved
        # At the activation: the gradients of what it read and wrote. What it wrote is freed, if it was saved at all.
        wide = count.numbers(ffn.size * (2 if self.adapters is None else 3))
        return wide + count.numbers(self.width * (int(ffn.learned_scale) + int(layer.post_norms)))

    def _moe(self, ffn: MoeSpec, saved: float) -> float:
        """At the sum of a token's rows their gradients; at the activation, when the rows are freed, as in an MLP."""
        if not ffn.gated or ffn.beside_mlp or ffn.weighed_shared or ffn.weigh_input or ffn.latent:
            return saved
        widest = max(self.width, 2 * ffn.size - self.width)
        if ffn.expert_bias:  # when it is added in the forward pass: the rows without it, and those of biases
            widest = max(2 * self.width, 3 * ffn.size - self.width)
        shared = self.width if ffn.shared is not None else 0  # the shared expert's gradient of their common input
        return self.count.numbers(ffn.experts_per_token * widest + shared)

    def _mixer(self, layer: LayerSpec) -> float:
        mixer, count = layer.mixer, self.count
        if isinstance(mixer, GatedDeltaNetSpec):  # a recurrence frees what it saved step by step
            return 3 * 4.0 * mixer.value_heads * mixer.value_dim
        if not isinstance(mixer, AttentionSpec) or not count.fuses_attention(mixer):
            return count.mixer_part(layer, self.width)
        queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
        inputs = 2 * self.width if self._has_adapter("attention.") else 0
        # Those of the output, of queries, keys and values, and the sums of the queries' in float32.
        return count.numbers(inputs + 2 * queries + 2 * keys) + 4.0 * queries

    def _has_adapter(self, *prefixes: str) -> bool:
        return self.adapters is not None and any(name.startswith(prefixes) for name, _ in self.adapters.ranks)


def layer_bytes(
    spec: DecoderSpec,
    index: int,
    *,
    size: int,
    fused: bool,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
) -> float:
    """Compute what layer ``index`` saves per token; ``size`` is the bytes of a value. Under ``lora`` it is frozen."""
    setting = _list_settings(spec, lora)[index]
    return _layer_bytes(setting, spec, size, fused, sequence, scan)


class _LayerSetting(NamedTuple):
    """What the bytes of a layer depend on, beside the model."""

    layer: LayerSpec
    quantization: QuantizationSpec | None
    adapters: LayerAdapters | None


def _list_settings(spec: DecoderSpec, lora: LoraSpec | None) -> list[_LayerSetting]:
    quantization, settings = spec.quantization, list[_LayerSetting]()
    for index, layer in enumerate(spec.layers):
        is_quantized = quantization is not None and quantizes_layer(quantization, index, spec.num_layers)
        is_known = lora is not None and not isinstance(spec, HfAdapterSpec)  # of those, all inputs are counted
        copies = layer.ffn.experts_per_token if isinstance(layer.ffn, MoeSpec) else 0
        adapters = LayerAdapters.from_lora(lora, index, copies) if is_known and lora is not None else None
        settings.append(_LayerSetting(layer, quantization if is_quantized else None, adapters))
    return settings


def _build_count(setting: _LayerSetting, spec: DecoderSpec, size: int, fused: bool, sequence: int) -> _SavedBytes:
    is_frozen = setting.adapters is not None
    return _SavedBytes(size=size, fused=fused, offset=spec.norm_offset != 0, sequence=sequence, frozen=is_frozen)


def _layer_bytes(
    setting: _LayerSetting, spec: DecoderSpec, size: int, fused: bool, sequence: int, scan: ContextScan
) -> float:
    layer, quantization, adapters = setting
    count = _build_count(setting, spec, size, fused, sequence)
    total = count.layer(layer, spec.hidden_size)
    if layer.mixer is not None and scan.ranks > 1:
        total += count.context_scan(layer.mixer, scan)
    total += saved_input_bytes(layer, spec.hidden_size, size=size, quantization=quantization, adapters=adapters)
    total += 0 if adapters is None else size * adapters.extra
    is_packed = quantization is not None and quantization.packed
    if adapters is not None and (is_packed or adapters.unmerged):
        # Beside its base an adapter saves the product of its input with its first factor.
        total += size * adapters.count_products(layer)
    return total


def stream_bytes(spec: DecoderSpec, size: int) -> float:
    """Compute what the decoder saves per token to normalize the embedding, to split it into residual streams and to
    join them.
    """
    if spec.embedding_norm:
        return 2.0 * size * spec.hidden_size
    if spec.altup is None:
        return 0.0
    others = spec.altup.streams - 1
    return float(size * spec.hidden_size * (4 * others + spec.altup.streams + 1))


class _Outputs(NamedTuple):
    """Values per token in the outputs of attention and the router, of linear layers, and of routed experts; and bytes
    of softmax statistics.
    """

    attended: float = 0.0
    linear: float = 0.0
    routed: float = 0.0
    statistics: float = 0.0


def _mixer_outputs(mixer: Mixer | None, width: int) -> _Outputs:
    match mixer:
        case AttentionSpec():
            queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            keys = 0 if mixer.kv_source is not None else keys
            linear = queries * (2 if mixer.gated else 1) + keys * (1 if mixer.value_from_key else 2) + width
            linear += mixer.num_heads if mixer.head_gate else 0
            return _Outputs(queries, linear, 0.0, 4.0 * mixer.num_heads)
        case RelativeAttentionSpec():
            queries = mixer.num_heads * mixer.head_dim
            linear = queries + mixer.kv_channels + mixer.num_heads * mixer.rank + width
            return _Outputs(queries, linear, 0.0, 4.0 * mixer.num_heads)
        case MlaSpec():
            linear = (mixer.query_rank or 0) + mixer.num_heads * mixer.head_dim + mixer.kv_rank + mixer.rope_dim
            linear += mixer.num_heads * (mixer.nope_dim + mixer.value_dim) + width
            return _Outputs(mixer.num_heads * mixer.value_dim, linear, 0.0, 4.0 * mixer.num_heads)
        case CompressedAttentionSpec():
            queries, outputs = mixer.num_heads * mixer.head_dim, mixer.output_groups * mixer.output_rank
            states = 0 if mixer.compressor is None else mixer.compressor.state_dim(mixer.head_dim)
            linear = mixer.query_rank + queries + mixer.head_dim + states + width
            return _Outputs(queries, linear + outputs, 0.0, 4.0 * mixer.num_heads)
        case GatedDeltaNetSpec():
            projected = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1)
            return _Outputs(linear=2 * projected + width)
        case KimiDeltaSpec():
            inner = mixer.num_heads * mixer.head_dim
            return _Outputs(linear=5 * inner + 2 * mixer.head_dim + mixer.num_heads + width)
        case MambaSpec():
            projected = mixer.num_heads * mixer.head_dim + mixer.groups * mixer.state_dim
            return _Outputs(linear=2 * projected + mixer.num_heads + width)
        case ShortConvSpec():
            return _Outputs(linear=3 * mixer.channels + width)
        case None:
            return _Outputs()


def _ffn_outputs(ffn: MlpSpec | MoeSpec | None, width: int) -> _Outputs:
    if ffn is None:
        return _Outputs()
    inner = ffn.size * (2 if ffn.gated else 1)
    if isinstance(ffn, MlpSpec):
        return _Outputs(linear=inner + width)
    linear = ffn.latent + width if ffn.latent else 0
    linear += ffn.weighed_shared * (inner + width)
    if ffn.shared is not None:
        linear += ffn.shared.size * (2 if ffn.shared.gated else 1) + width + (1 if ffn.shared_gate else 0)
    return _Outputs(ffn.num_experts, linear, ffn.experts_per_token * (inner + (ffn.latent or width)))


def _matmul_output_bytes(setting: _LayerSetting, width: int, size: int, fused: bool) -> float:
    """Compute the outputs of attention and matmuls per token, plus the softmax statistics of attention.

    Inputs that are quantized but dequantized again give an output in float32. The FP8 kernel of experts is no matmul of
    torch's, so its output is not saved but recomputed.
    """
    pairs = zip(_mixer_outputs(setting.layer.mixer, width), _ffn_outputs(setting.layer.ffn, width), strict=True)
    outputs = _Outputs(*map(sum, pairs))
    altup = setting.layer.altup
    if altup is not None:  # the mixture of streams, its coefficients, and the learned residual
        streams = altup.streams
        mixed = streams * width + streams**2 + 3 * streams + setting.layer.laurel_rank + width
        outputs = outputs._replace(linear=outputs.linear + mixed)
    linear = routed = size
    quantization = setting.quantization
    if quantization is not None and quantization.format.quantizes_activations:
        has_kernel = fused and quantization.format.scale == "float32"
        linear = size if has_kernel or quantization.experts_only else 4
        routed = 0 if has_kernel else 4
    return outputs.attended * size + outputs.linear * linear + outputs.routed * routed + outputs.statistics


def _head_bytes(
    spec: DecoderSpec, tokens: int, size: int, fused: bool, *, is_trained: bool, keeps_grads: bool
) -> float:
    """Compute what log-probs take at their widest: logits of a chunk in float32, those of the chunk before or their
    gradients, and gradients of the output layer, or of all logits where these are kept.
    """
    has_kernel = fused and size < 4
    rows = min(tokens, max(1, _CHUNK_LOGITS[fused] * (2 if has_kernel else 1) // spec.vocab_size))
    chunk = rows * spec.vocab_size * 4.0
    if has_kernel and keeps_grads:
        return tokens * spec.vocab_size * size + (2 if tokens > rows else 1) * chunk
    # The float32 gradient of the output layer, which an adapter of it does without.
    head_gradient = 4.0 * spec.vocab_size * spec.hidden_size if is_trained else 0.0
    return chunk * (2 if has_kernel else 3) + head_gradient


class StepMoments(NamedTuple):
    """Bytes of activations at those moments of a step that may be its widest: at the head, and in each layer's backward
    pass, with what that holds beyond the saved tensors and without (``saved``).
    """

    head: int
    layers: tuple[int, ...]
    saved: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most of them."""
        return max(self.head, *self.layers)


def activation_bytes(
    spec: DecoderSpec,
    tokens: int,
    *,
    size: int,
    fused: bool,
    checkpointing: bool = False,
    recompute: RecomputeMode = "none",
    first: int | None = None,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    experts: int = 1,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
    keeps_logit_grads: bool = False,
) -> int:
    """Compute the peak of a step besides weights, gradients and optimizer, with ``tokens`` in a rank's micro-batch.

    ``checkpointing`` is ``full`` recomputation. The rest is as in ``list_step_moments``.
    """
    return list_step_moments(
        spec,
        tokens,
        size=size,
        fused=fused,
        recompute="full" if checkpointing else recompute,
        first=first,
        sequence=sequence,
        lora=lora,
        experts=experts,
        scan=scan,
        keeps_logit_grads=keeps_logit_grads,
    ).peak


def list_step_moments(
    spec: DecoderSpec,
    tokens: int,
    *,
    size: int,
    fused: bool,
    recompute: RecomputeMode = "none",
    first: int | None = None,
    sequence: int = 1,
    lora: LoraSpec | None = None,
    experts: int = 1,
    scan: ContextScan = ContextScan(),  # noqa: B008 (immutable)
    keeps_logit_grads: bool = False,
) -> StepMoments:
    """Compute what a step has of activations at each moment, with ``tokens`` in a rank's micro-batch.

    Under ``full`` recomputation a layer saves only its input, and one layer at a time is recomputed; ``selective`` also
    saves attention and matmul outputs. If only the ``first`` layers are recomputed, the others save everything.
    Sequence parallelism shards the residual stream over ``sequence`` ranks. With ``lora`` only its adapters are
    trained. ``experts`` ranks share the experts of a layer. ``scan`` is what context ranks scan of recurrent layers.
    ``keeps_logit_grads``: logits are computed once (``train.logprobs``).
    """
    settings = _list_settings(spec, lora)
    recomputed = 0 if recompute == "none" else len(settings) if first is None else min(first, len(settings))
    workspace = quantize_workspace_bytes(spec, size=size, fused=fused, experts=experts)
    streams = spec.streams if spec.altup is None else spec.altup.streams
    entered = streams * spec.hidden_size * size / sequence
    costs: dict[_LayerSetting, tuple[float, float, float]] = {}
    for setting in set(settings):
        saved = _layer_bytes(setting, spec, size, fused, sequence, scan)
        kept = 0.0 if recompute != "selective" else _matmul_output_bytes(setting, spec.hidden_size, size, fused)
        count = _build_count(setting, spec, size, fused, sequence)
        gradients = _Gradients(count=count, width=spec.hidden_size, adapters=setting.adapters)
        is_derived = setting.quantization is None and experts == 1 and scan.ranks == 1
        wide = gradients.layer(setting.layer, saved) if is_derived else saved + 2 * count.numbers(spec.hidden_size)
        costs[setting] = saved, entered + kept, wide
    # What does not depend on the layer: split streams; the head's gradient waits for the embedding's if they are tied.
    fixed = tokens * stream_bytes(spec, size) + _factor_bytes(spec, size, lora, len(settings), recomputed)
    tied = spec.vocab_rows * spec.hidden_size * size if spec.tie_embeddings and lora is None else 0
    before = fixed + tied
    layers, held = list[int](), list[int]()
    for index, setting in enumerate(settings):
        saved, kept, wide = costs[setting]
        is_again = index < recomputed
        # Its input is both kept and, as what its first norm read, a part of what it has saved.
        whole = before + tokens * (saved + (kept - entered if is_again else 0.0))
        layers.append(round(whole + max(tokens * wide, workspace)))
        held.append(round(whole))
        before += tokens * (kept if is_again else saved)
    # The hidden states behind the last layer, before and after their norm.
    head = before - tied + tokens * 2 * spec.hidden_size * size
    head += _head_bytes(spec, tokens, size, fused, is_trained=lora is None, keeps_grads=keeps_logit_grads)
    return StepMoments(round(head), tuple(layers), tuple(held))


def _factor_bytes(spec: DecoderSpec, size: int, lora: LoraSpec | None, layers: int, recomputed: int) -> int:
    """Compute the LoRA factors saved in the model's dtype beside a base; if recomputed, one layer's at a time."""
    is_packed = spec.quantization is not None and spec.quantization.packed
    if lora is None or not (is_packed or lora.unmerged):
        return 0
    return lora.num_parameters * size // (layers if recomputed == layers else 1)
