"""Models that the Megatron backend supports, from their specs. No torch and no Megatron, so that rules can ask."""

from __future__ import annotations

from miles.backends.megatron.module_choice import AdaptedPart, can_use_transformer_engine, choose_modules
from miles.cluster.parallel_dims import ParallelDims
from miles.models.parallel.quantized_shards import find_divided_block
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    MlaSpec,
    MoeSpec,
    RelativeAttentionSpec,
)


def check_megatron_support(
    spec: DecoderSpec, layout: ParallelDims, adapted: frozenset[AdaptedPart] = frozenset()
) -> str | None:
    """Return why Megatron cannot train this model, or these ``adapted`` parts, in this layout (a sentence), or None."""
    problem = layout.find_model_problem(spec, slices_layer_inputs=True)
    if problem is not None:
        return problem
    found = _indivisible(spec, layout, adapted)
    if found is not None:
        return f"the megatron backend cannot train {spec.family}: {found}; use --train-backend fsdp."
    if spec.moe is not None and layout.tensor > 1 and not layout.sequence:
        return "Megatron-Core trains experts under tensor parallelism only with --sequence-parallel: add it."
    return None


def check_batch_invariant_support(spec: DecoderSpec, layout: ParallelDims) -> str | None:
    """Return why Megatron has no batch-invariant layers for this model in this layout (a sentence), or None."""
    keys = [layer.mixer.num_kv_heads for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if any(count % layout.tensor for count in keys):
        return (
            "--parity exact with --train-backend megatron needs a number of key-value heads that is a multiple of "
            f"--tensor-model-parallel-size {layout.tensor}, but the model has {min(keys)}; use --train-backend fsdp."
        )
    if spec.moe is not None and layout.expert_tensor not in (None, layout.tensor):
        return (
            "--parity exact needs experts that are sharded over tensor-parallel ranks as in the engine; remove "
            f"--expert-tensor-parallel-size {layout.expert_tensor}."
        )
    if spec.quantization is not None and not holds_packed_weights(spec):
        return (
            f"--parity exact does not work with --train-precision {spec.quantization.format.name} under "
            "--train-backend megatron, whose FP8 is Transformer Engine's; use --train-backend fsdp."
        )
    return None


def holds_packed_weights(spec: DecoderSpec) -> bool:
    """Return whether weights are packed: those of a frozen base under adapters."""
    return spec.quantization is not None and spec.quantization.packed


def check_quantization_support(spec: DecoderSpec, layout: ParallelDims) -> str | None:
    """Return why Transformer Engine cannot train a quantized model, or why the ranks cannot share packed weights (a
    sentence), or None if they can.
    """
    if holds_packed_weights(spec):
        divided = find_divided_block(spec, layout.tensor)
        return None if divided is None else f"{divided}; lower --tensor-model-parallel-size."
    if spec.quantization is None or can_use_transformer_engine(spec):
        return None
    return (
        f"--train-precision {spec.quantization.format.name} with --train-backend megatron is Transformer Engine's, "
        f"which has no form of all layers of {spec.family}; use --train-backend fsdp."
    )


def _indivisible(spec: DecoderSpec, layout: ParallelDims, adapted: frozenset[AdaptedPart]) -> str | None:
    """Return which size cannot be divided evenly among the ranks, as Megatron requires."""
    own, modules = layout.expert_tensor or layout.tensor, choose_modules(spec, adapted)
    parts = [
        (layer.ffn.size, own if isinstance(layer.ffn, MoeSpec) else layout.tensor) for layer in spec.layers if layer.ffn
    ]
    for i, layer in enumerate(spec.layers):
        mixer = layer.mixer if i in modules.mixers else None
        if isinstance(mixer, AttentionSpec | RelativeAttentionSpec) and mixer.num_kv_heads % layout.tensor:
            heads = f"layer {i} has {mixer.num_kv_heads} key-value heads"
            return f"{heads}, which cannot be divided evenly among {layout.tensor} tensor-parallel ranks"
        if i in modules.ffns and isinstance(layer.ffn, MoeSpec) and own != layout.tensor:
            return f"the experts of layer {i} are sharded like its other layers, not by --expert-tensor-parallel-size"
        if isinstance(layer.mixer, MlaSpec) and i not in modules.mixers:
            parts += [
                (layer.mixer.query_rank or 0, layout.tensor),
                (layer.mixer.kv_rank + layer.mixer.rope_dim, layout.tensor),
            ]
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.shared is not None:
            parts.append((layer.ffn.shared.size, layout.tensor))
    odd = next(((size, ranks) for size, ranks in parts if size % ranks), None)
    return None if odd is None else f"{odd[0]} channels cannot be divided evenly among {odd[1]} tensor-parallel ranks"
