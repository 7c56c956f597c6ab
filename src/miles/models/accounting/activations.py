"""Activation memory of a training step: what autograd saves of a micro-batch until backward, from the spec. No torch.

Counted are the saved tensors, module by module, in values per token; temporary kernel memory is about one more layer.
On an accelerator norms, gates and attention are fused kernels and save less (``fused``), and in half precision so is
what lies between a projection and attention.

For a tensor-parallel model pass one rank's spec; the residual stream is replicated on each rank, unless sequence
parallelism shards its tokens over ``sequence`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.models.accounting.params import CHUNK
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
)

RecomputeMode = Literal["none", "selective", "full"]

# Numbers whose logits exist at once in a training step, and how many such tensors the step holds at its widest. (In
# half precision on an accelerator they are twice as many, and the gradients are half as wide: the same.)
_LOGITS = {False: 1 << 24, True: 1 << 27}
_LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedBytes:
    """Bytes per token saved by each module, in a model of ``size`` bytes per value.

    ``quantized`` are the bytes of a value in a quantized input, which a linear layer saves in place of its input; None
    where inputs are not quantized. With ``experts_only`` those of routed experts alone are.
    """

    size: int
    fused: bool
    offset: bool
    sequence: int = 1
    quantized: float | None = None
    experts_only: bool = False

    @property
    def triton_training(self) -> bool:
        """Whether the Triton training kernels are used."""
        return self.fused and self.size < 4

    def numbers(self, count: float) -> float:
        return count * self.size

    def norm(self, width: int) -> float:
        """Its input and its output, and if not fused the normalized but unscaled values."""
        between = 0 if self.fused else width
        # The input of a layer's part has all tokens; the norm's input and output have this rank's tokens.
        if self.sequence > 1:
            return self.numbers(width) + (self.numbers(2 * width + between) + 4.0) / self.sequence
        if self.offset and self.size < 4 and not self.triton_training:
            return self.numbers(width) + 4.0 * (width + between)
        return self.numbers(2 * width + between) + 4.0

    def post_norm(self, width: int) -> float:
        """A norm whose output is only added: its input, and the normalized values."""
        wide = 4 if self.offset and not self.triton_training else self.size
        return (float(width * (wide if self.fused else 2 * wide)) + 4.0) / self.sequence

    def attention(self, spec: AttentionSpec) -> float:
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        both = queries + keys
        if self.triton_training and not spec.gated and spec.qk_norm in ("none", "head") and spec.temperature is None:
            # Queries, keys and values as attention takes them, and the projection output if QK-norm needs it.
            made = 2 if spec.qk_norm == "head" else 1
            return self.numbers(made * (queries + 2 * keys)) + self._attention_output(spec.num_heads, queries)
        total = self.numbers(queries * (2 if spec.gated else 1) + 2 * keys)
        if spec.gated:
            total += self.numbers(both + 3 * queries)
        if spec.qk_norm != "none":
            total += self.numbers(both) * (2 if self.offset and self.size < 4 else 1)
        if spec.rope is not None:
            total += self.numbers(both)
        return total + self._attention_output(spec.num_heads, queries)

    def _attention_output(self, heads: int, width: int) -> float:
        return self.numbers(width) + 4.0 * heads

    def mla(self, spec: MlaSpec) -> float:
        queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
        total = self.norm(spec.kv_rank) + self.numbers(spec.rope_dim)
        if spec.query_rank is not None:
            total += self.norm(spec.query_rank)
        expanded = spec.num_heads * (spec.nope_dim + spec.value_dim)
        total += self.numbers(2 * queries + expanded + values)
        return total + self._attention_output(spec.num_heads, values)

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

    def mlp(self, spec: MlpSpec) -> float:
        return self.numbers(self._inner(spec))

    def _inner(self, spec: MlpSpec | MoeSpec) -> int:
        """What an MLP (or an expert) saves between its two projections; the clamped SwiGLU is one function."""
        if spec.activation == "swiglu_clamped" or (spec.gated and self.triton_training):
            return 3 * spec.size
        return spec.size * (4 if spec.gated else 2)

    def moe(self, spec: MoeSpec, width: int) -> float:
        inner = spec.latent or width
        rows = self.numbers(2 * inner + self._inner(spec))
        total = spec.experts_per_token * (rows + 8 * 5) + 4.0 * spec.num_experts
        if spec.shared is not None:
            total += self.mlp(spec.shared) + (self.numbers(width) if spec.shared_gate else 0)
        return total + (self.numbers(inner + width) if spec.latent else 0)

    def quantized_inputs(self, layer: LayerSpec, width: int) -> float:
        """The bytes that the quantized inputs of linear layers take, less those of the inputs in their place.

        The output of attention and the input of a router are saved in any case.
        """
        if self.quantized is None:
            return 0.0
        each, less = self.quantized, self.quantized - self.size
        total = 0.0
        if isinstance(layer.mixer, AttentionSpec) and not self.experts_only:
            total += width * less
            total += layer.mixer.num_heads * layer.mixer.head_dim * (less if layer.mixer.gated else each)
        if isinstance(layer.ffn, MlpSpec) and not self.experts_only:
            total += (width + layer.ffn.size) * less
        if isinstance(layer.ffn, MoeSpec):
            total += layer.ffn.experts_per_token * ((layer.ffn.latent or width) + layer.ffn.size) * less
            if layer.ffn.shared is not None and not self.experts_only:
                total += width * each + layer.ffn.shared.size * less
        return total

    def layer(self, layer: LayerSpec, width: int) -> float:
        total = self.quantized_inputs(layer, width)
        if layer.mixer is not None:
            total += self.norm(width) + (self.post_norm(width) if layer.post_norms else 0.0)
            match layer.mixer:
                case AttentionSpec():
                    total += self.attention(layer.mixer)
                case MlaSpec():
                    total += self.mla(layer.mixer)
                case GatedDeltaNetSpec():
                    total += self.delta(layer.mixer)
                case MambaSpec():
                    total += self.mamba(layer.mixer)
        if layer.ffn is not None:
            total += self.norm(width) + (self.post_norm(width) if layer.post_norms else 0.0)
            total += self.mlp(layer.ffn) if isinstance(layer.ffn, MlpSpec) else self.moe(layer.ffn, width)
        return total


def layer_bytes(spec: DecoderSpec, layer: LayerSpec, *, size: int, fused: bool, sequence: int = 1) -> float:
    """Compute what one layer saves per token; ``size`` is the bytes of a value."""
    quantization = spec.quantization
    count = _SavedBytes(
        size=size,
        fused=fused,
        offset=spec.norm_offset != 0,
        sequence=sequence,
        quantized=None if quantization is None else quantization.format.activation_bytes,
        experts_only=quantization is not None and quantization.experts_only,
    )
    return count.layer(layer, spec.hidden_size)


def _matmul_output_bytes(layer: LayerSpec, width: int, size: int) -> float:
    """Compute the outputs of attention and matmuls per token, plus the softmax statistics of attention."""
    numbers = statistics = 0.0
    match layer.mixer:
        case AttentionSpec() as mixer:
            queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            numbers += queries * (2 if mixer.gated else 1) + 2 * keys + queries + width
            statistics += 4.0 * mixer.num_heads
        case MlaSpec() as mixer:
            numbers += (mixer.query_rank or 0) + mixer.num_heads * mixer.head_dim + mixer.kv_rank + mixer.rope_dim
            numbers += mixer.num_heads * (mixer.nope_dim + 2 * mixer.value_dim) + width
            statistics += 4.0 * mixer.num_heads
        case GatedDeltaNetSpec() as mixer:
            numbers += 2 * (mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1)) + width
        case MambaSpec() as mixer:
            numbers += 2 * (mixer.num_heads * mixer.head_dim + mixer.groups * mixer.state_dim) + mixer.num_heads + width
        case None:
            pass
    match layer.ffn:
        case MlpSpec() as ffn:
            numbers += ffn.size * (2 if ffn.gated else 1) + width
        case MoeSpec() as ffn:
            inner = ffn.latent or width
            numbers += ffn.experts_per_token * (ffn.size * (2 if ffn.gated else 1) + inner) + ffn.num_experts
            numbers += inner + width if ffn.latent else 0
            if ffn.shared is not None:
                numbers += ffn.shared.size * (2 if ffn.shared.gated else 1) + width + (1 if ffn.shared_gate else 0)
        case None:
            pass
    return numbers * size + statistics


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
) -> int:
    """Compute the peak of a step besides weights, gradients and optimizer, with ``tokens`` in a rank's micro-batch.

    Under ``full`` recomputation (also ``checkpointing``) a layer saves only its input, and one layer at a time is
    recomputed; ``selective`` also saves attention and matmul outputs. If only the ``first`` layers are recomputed, the
    others save everything. Sequence parallelism shards the residual stream over ``sequence`` ranks.
    """
    mode: RecomputeMode = "full" if checkpointing else recompute
    layers = {layer: layer_bytes(spec, layer, size=size, fused=fused, sequence=sequence) for layer in set(spec.layers)}
    largest = max(layers.values())
    recomputed = 0 if mode == "none" else len(spec.layers) if first is None else min(first, len(spec.layers))
    saved = sum(layers[layer] for layer in spec.layers[recomputed:])
    if recomputed:
        saved += recomputed * spec.hidden_size * size / sequence + largest
        width, selective = spec.hidden_size, spec.layers[:recomputed] if mode == "selective" else ()
        saved += sum(_matmul_output_bytes(layer, width, size) for layer in selective)
    body = tokens * (saved + largest + 4 * spec.hidden_size * size)
    rows = min(tokens, max(1, _LOGITS[fused] // spec.vocab_size))
    head = rows * spec.vocab_size * 4 * _LOGIT_COPIES + 4 * spec.vocab_size * spec.hidden_size
    return round(body + head)
