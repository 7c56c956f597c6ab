"""Spec of a model run by transformers, from its config and tensor headers alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from miles.core.errors import UsageError
from miles.models.checkpoint.safetensors_io import StoredTensor, stored_tensors
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec
from miles.models.vision.spec import PoolProjectorSpec, VisionMlpSpec, VisionSpec, VisionTowerSpec

# Names that configs have for one quantity, the usual one first.
_VOCABULARY = ("vocab_size",)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INNER = ("intermediate_size", "n_inner", "ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_KV_HEADS = ("num_key_value_heads",)
_HEAD_DIM = ("head_dim",)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")

_IMAGE_TOKENS = ("image_token_id", "image_token_index")

# Names of routers, and parts of the names of matrices without adapters.
_ROUTERS = ("gate", "router", "wg", "shared_expert_gate")
_NO_TARGETS = re.compile(r"\.experts\.|vision|visual|image|audio|embed|norm")

# These rope types depend on the longest sequence of a batch beyond the original length, which rules out packing.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfAdapterSpec(DecoderSpec):
    """A model computed by transformers. ``layers`` describe its attention, from which the KV cache follows; the rest of
    them is a guess, and so is the tower of ``vision``, of which the placeholder token alone is used to compute.

    Hidden states are multiplied by ``hidden_scale`` before the head. ``active`` counts the parameters used per token.
    ``linears`` are the modules of layers that LoRA adapters may be added to, by the shapes of their weights.
    ``recurrent`` and ``moe`` are never set: recurrent models are rejected, and routing is internal to transformers.
    """

    architecture: str
    parameters: int
    active: int
    hidden_scale: float = 1.0
    linears: tuple[tuple[str, tuple[int, int]], ...] = ()


def build_hf_adapter_spec(config: Mapping[str, Any], folder: Path | str) -> HfAdapterSpec:
    """Build the spec of the checkpoint in ``folder`` as far as its files tell; loading the model completes it."""
    text: Mapping[str, Any] = config.get("text_config") or config
    if config.get("quantization_config"):
        raise UsageError(
            "quantization_config of config.json says the weights are quantized; quantized weights cannot be trained."
        )
    heads = _size(text, _HEADS)
    kv_heads = _size(text, _KV_HEADS, heads)
    hidden = _size(text, _HIDDEN)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=_size(text, _HEAD_DIM, max(1, hidden // heads)),
        rope=None,
    )
    stored = stored_tensors(folder)
    total, active = _parameters(text, stored)
    architectures = config.get("architectures") or (config.get("model_type"),)
    vision = _guess_vision(config, str(architectures[0]))
    return HfAdapterSpec(
        family=str(config.get("model_type")),
        architecture=str(architectures[0]),
        vocab_size=_size(text, _VOCABULARY),
        hidden_size=hidden,
        norm_eps=0.0,
        layers=(LayerSpec(mixer=attention, ffn=MlpSpec(size=_size(text, _INNER, 4 * hidden))),) * _size(text, _LAYERS),
        tie_embeddings=not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in stored),
        max_positions=_positions(text),
        eos_token_ids=_eos_token_ids(config, text),
        parameters=total,
        active=active,
        linears=_find_linears(stored),
        vision=vision,
    )


def _find_linears(stored: Mapping[str, StoredTensor]) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return the matrices of layers, but those of routers, routed experts and vision towers."""
    found: list[tuple[str, tuple[int, int]]] = []
    for name, tensor in stored.items():
        parts = name.split(".")
        is_matrix = parts[-1] == "weight" and len(tensor.shape) == 2 and any(part.isdigit() for part in parts)
        if is_matrix and parts[-2] not in _ROUTERS and not _NO_TARGETS.search(name):
            found.append((name.removesuffix(".weight"), (tensor.shape[0], tensor.shape[1])))
    return tuple(sorted(found, key=lambda each: _natural_key(each[0])))


def _natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort layer 2 before layer 10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _guess_vision(config: Mapping[str, Any], architecture: str) -> VisionSpec | None:
    """The vision part of a model that takes images, as far as memory is estimated from it; None if it takes none.

    Multimodal RoPE is not passed on to transformers, so that models with it run on text alone.
    """
    tower, text = config.get("vision_config"), config.get("text_config") or {}
    if any("mrope_section" in (text.get(key) or ()) for key in ("rope_parameters", "rope_scaling")):
        return None
    token = next((config[key] for key in _IMAGE_TOKENS if type(config.get(key)) is int), None)
    if not isinstance(tower, Mapping) or token is None or not architecture.endswith("ForConditionalGeneration"):
        return None
    hidden = _size(tower, ("hidden_size", "embed_dim"), 1024)
    return VisionSpec(
        image_token_id=token,
        tower=VisionTowerSpec(
            hidden_size=hidden,
            num_layers=_size(tower, ("num_hidden_layers", "depth"), 24),
            num_heads=1,
            mlp=VisionMlpSpec(size=_size(tower, _INNER, 4 * hidden), activation="gelu"),
            norm="layer",
            norm_eps=1e-6,
            patch_size=_size(tower, ("patch_size",), 14),
            rope_theta=None,
            projector=PoolProjectorSpec(),
        ),
    )


def _size(config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if default is not None:
        return default
    raise UsageError(f"config.json has no {keys[0]} (a positive integer); add it.")


def _positions(config: Mapping[str, Any]) -> int:
    """Return the context length up to which RoPE frequencies do not depend on the batch."""
    longest = _size(config, _POSITIONS)
    groups: list[Mapping[str, Any]] = [
        group for key in ("rope_scaling", "rope_parameters") if isinstance(group := config.get(key), Mapping)
    ]
    groups += [inner for group in groups for inner in group.values() if isinstance(inner, Mapping)]
    for group in groups:
        if (group.get("rope_type") or group.get("type")) in _BATCH_DEPENDENT_ROPE:
            key = "original_max_position_embeddings"
            longest = min(longest, _size(group, (key,), _size(config, (key,), longest)))
    return longest


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    value = next((c["eos_token_id"] for c in configs if c.get("eos_token_id") is not None), ())
    return (value,) if isinstance(value, int) else tuple(value)


def _parameters(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """Count all parameters, and those used per token."""
    sizes = {name: prod(tensor.shape) for name, tensor in stored.items()}
    total = sum(sizes.values())
    experts = _size(config, _EXPERTS, 1)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    return total, total - routed + routed * min(experts, _size(config, _PER_TOKEN, experts)) // experts
