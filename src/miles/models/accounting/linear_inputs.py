"""Inputs of linear layers that autograd saves: wide, quantized, or none if the weight is frozen. No torch.

A linear layer saves its input for the gradient of its weight. One that quantizes activations saves the quantized input,
with scales in float32, in place of the wide one; each of several that read the same input saves its own. A frozen one
saves nothing, but the LoRA adapter of it saves the wide input, whatever the base is quantized to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miles.models.lora.targets import LoraSpec
from miles.models.quantization import find_quantized_layer
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
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

__all__ = ["LayerAdapters", "LinearInput", "list_linear_inputs", "saved_input_bytes"]

_SCALE_BYTES = 4
# Projections whose outputs are added to the residual stream, and saved by nothing.
_ADDED_OUTPUTS = (".output.weight", ".down.weight")
_ROUTED = ("moe.gate_up", "moe.up", "moe.down")


@dataclass(frozen=True, slots=True)
class LinearInput:
    """What some linear layers read: ``rows`` of ``width`` values per token.

    ``readers`` are the parameters' names in the layer. ``is_saved``: something other than a linear layer saves it too.
    """

    readers: tuple[str, ...]
    width: int
    rows: int = 1
    is_saved: bool = False


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """LoRA in one layer: the parameters with adapters, and the adapters' rank in each, summed over their targets.

    ``extra`` are values per token that DoRA saves: outputs that nothing else does; or dropout: a mask and its product
    with the input for each target, in place of the input. ``unmerged`` as in ``LoraSpec``.
    """

    ranks: tuple[tuple[str, int], ...]
    extra: int = 0
    unmerged: bool = False

    @classmethod
    def from_lora(cls, lora: LoraSpec, layer: int, experts_per_token: int = 0) -> LayerAdapters:
        """Select those of a layer by its index."""
        ranks: dict[str, int] = {}
        extra, seen = 0, set[str]()
        for target in lora.targets:
            prefix = f"layers.{layer}."
            if target.param_name.startswith(prefix):
                if lora.use_dora and target.param_name.endswith(_ADDED_OUTPUTS):
                    extra += target.outputs
                if lora.dropout:
                    copies = experts_per_token if target.num_experts else 1
                    extra += (2 if target.param_name in seen else 1) * target.inputs * copies
                seen.add(target.param_name)
                name = target.param_name.removeprefix(prefix).removesuffix(".weight")
                ranks[name] = ranks.get(name, 0) + lora.rank
        return cls(tuple(sorted(ranks.items())), extra, lora.unmerged)

    def count_products(self, layer: LayerSpec) -> int:
        """Count the values per token of the products of inputs with A factors."""
        per_token = layer.ffn.experts_per_token if isinstance(layer.ffn, MoeSpec) else 1
        return sum(rank * (per_token if name in _ROUTED else 1) for name, rank in self.ranks)


def list_linear_inputs(layer: LayerSpec, width: int) -> Iterator[LinearInput]:
    """List the inputs of a layer's linear layers and experts, each once."""
    yield from _list_mixer_inputs(layer.mixer, width)
    match layer.ffn:
        case MlpSpec() as ffn:
            yield LinearInput(("mlp.gate_up" if ffn.gated else "mlp.up",), width)
            yield LinearInput(("mlp.down",), ffn.size)
        case MoeSpec() as ffn:
            yield from _list_moe_inputs(ffn, width)
        case None:
            pass


def _list_mixer_inputs(mixer: Mixer | None, width: int) -> Iterator[LinearInput]:
    match mixer:
        case AttentionSpec():
            gate = ("attention.gate",) if mixer.head_gate else ()
            yield LinearInput(("attention.qkv", *gate), width)
            queries = mixer.num_heads * mixer.head_dim
            yield LinearInput(("attention.output",), queries, is_saved=not (mixer.gated or mixer.head_gate))
        case RelativeAttentionSpec():
            yield LinearInput(("relative.qkv", "relative.relative"), width)
            yield LinearInput(("relative.output",), mixer.num_heads * mixer.head_dim, is_saved=True)
        case MlaSpec():
            first = "mla.q" if mixer.query_rank is None else "mla.q_a"
            yield LinearInput((first, "mla.kv_a"), width)
            if mixer.query_rank is not None:
                yield LinearInput(("mla.q_b",), mixer.query_rank)
            yield LinearInput(("mla.kv_b",), mixer.kv_rank)
            yield LinearInput(("mla.output",), mixer.num_heads * mixer.value_dim)
        case CompressedAttentionSpec():
            compressor = ("compressed.compressor.kv_gate",) if mixer.compressor is not None else ()
            yield LinearInput(("compressed.q_a", "compressed.kv", *compressor), width)
            yield LinearInput(("compressed.q_b",), mixer.query_rank)
            yield LinearInput(("compressed.output_groups",), mixer.num_heads * mixer.head_dim)
            yield LinearInput(("compressed.output",), mixer.output_groups * mixer.output_rank)
        case None:
            pass
        case _:
            yield from _list_recurrent_inputs(mixer, width)


def _list_recurrent_inputs(mixer: RecurrentMixer, width: int) -> Iterator[LinearInput]:
    match mixer:
        case GatedDeltaNetSpec():
            yield LinearInput(("delta.qkvz", "delta.ba"), width)
            yield LinearInput(("delta.output",), mixer.value_heads * mixer.value_dim)
        case KimiDeltaSpec():
            yield LinearInput(("kda.qkv", "kda.f_a", "kda.b", "kda.g_a"), width)
            yield LinearInput(("kda.f_b",), mixer.head_dim)
            yield LinearInput(("kda.g_b",), mixer.head_dim)
            yield LinearInput(("kda.output",), mixer.num_heads * mixer.head_dim)
        case MambaSpec():
            yield LinearInput(("mamba.input",), width)
            yield LinearInput(("mamba.output",), mixer.num_heads * mixer.head_dim)
        case ShortConvSpec():
            yield LinearInput(("short_conv.input",), width)
            yield LinearInput(("short_conv.output",), mixer.channels)


def _list_moe_inputs(ffn: MoeSpec, width: int) -> Iterator[LinearInput]:
    readers = ["moe.router", *(["moe.into"] if ffn.latent else [])]
    if ffn.shared is not None:
        readers.append("moe.shared.gate_up" if ffn.shared.gated else "moe.shared.up")
        readers += ["moe.shared_gate"] if ffn.shared_gate else []
        yield LinearInput(("moe.shared.down",), ffn.shared.size)
    yield LinearInput(tuple(readers), width)
    inner = ffn.latent or width
    yield LinearInput(("moe.gate_up" if ffn.gated else "moe.up",), inner, ffn.experts_per_token)
    yield LinearInput(("moe.down",), ffn.size, ffn.experts_per_token)
    if ffn.latent:
        yield LinearInput(("moe.outof",), inner)


def saved_input_bytes(
    layer: LayerSpec,
    width: int,
    *,
    size: int,
    quantization: QuantizationSpec | None,
    adapters: LayerAdapters | None,
) -> float:
    """Compute the bytes per token that inputs take beyond one wide copy of each: negative where they take less.

    ``quantization`` is None for a layer that is not quantized; with ``adapters`` the weights are frozen.
    """
    format = None if quantization is None or not quantization.format.quantizes_activations else quantization.format
    ranks = {} if adapters is None else dict(adapters.ranks)
    total = 0.0
    for each in list_linear_inputs(layer, width):
        quantized = 0
        is_wide = each.is_saved or any(name in ranks for name in each.readers)
        # Grouped GEMMs of experts that are not quantized save their inputs even if they are frozen.
        is_wide |= any(name in _ROUTED and not _is_quantized(name, quantization) for name in each.readers)
        for name in each.readers if adapters is None else ():
            if format is None or not _is_quantized(name, quantization):
                is_wide = True
            else:
                quantized += each.width + _SCALE_BYTES * -(-each.width // (format.activation_columns or each.width))
        total += each.rows * (quantized - (0 if is_wide else each.width * size))
    return total


def _is_quantized(name: str, quantization: QuantizationSpec | None) -> bool:
    if quantization is None:
        return False
    param = f"layers.0.{name}" if name in _ROUTED else f"layers.0.{name}.weight"
    return find_quantized_layer(param, experts_only=quantization.experts_only) is not None
