"""SigLIP vision towers: how their config is read and what their tensors are called, for the families that have one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from miles.models.families.vision_config import VisionConfigReader
from miles.models.vision.spec import PositionTableSpec, ProjectorSpec, VisionMlpSpec, VisionTowerSpec

# transformers' defaults for a config that does not name them; sizes differ between families.
SIGLIP_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_channels": 3,
        "image_size": 224,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
)
SIGLIP_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "patch_embed": "embeddings.patch_embedding",
        "position_table": "embeddings.position_embedding.weight",
        "vision_block": "encoder.layers.{}",
        "vision_attention_norm": "layer_norm1",
        "vision_mlp_norm": "layer_norm2",
        "vision_q": "self_attn.q_proj",
        "vision_k": "self_attn.k_proj",
        "vision_v": "self_attn.v_proj",
        "vision_o": "self_attn.out_proj",
        "vision_up": "mlp.fc1",
        "vision_down": "mlp.fc2",
        "vision_post_norm": "post_layernorm",
    }
)


def read_siglip_tower(reader: VisionConfigReader, projector: ProjectorSpec) -> VisionTowerSpec:
    """Read a tower over tiles of one size, with learned positions."""
    hidden, patch = reader.positive_int("hidden_size"), reader.positive_int("patch_size")
    return VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=reader.heads("num_attention_heads", hidden),
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation=reader.activation()),
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-6),
        patch_size=patch,
        channels=reader.positive_int("num_channels"),
        pixels="tiles",
        patch_bias=True,
        rope_theta=None,
        positions=PositionTableSpec(side=reader.positive_int("image_size") // patch, kind="fixed"),
        post_norm=True,
        projector=projector,
    )
