"""Hugging Face tensor names and shapes of vision towers. No torch.

``VISION_NAMES`` is what most families call a tensor; a family overrides the entries in which it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from miles.models.checkpoint.param_slices import ModuleNames, ParamMap
from miles.models.vision.spec import MergerSpec, VisionNorm, VisionSpec, VisionTowerSpec

VISION_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "vision": "model.visual",
        "patch_embed": "patch_embed.proj",
        "position_table": "pos_embed",
        "vision_block": "blocks.{}",
        "vision_attention_norm": "norm1",
        "vision_mlp_norm": "norm2",
        "vision_q": "attn.q",
        "vision_k": "attn.k",
        "vision_v": "attn.v",
        "vision_o": "attn.proj",
        "vision_gate": "mlp.gate_proj",
        "vision_up": "mlp.linear_fc1",
        "vision_down": "mlp.linear_fc2",
        "merger": "merger",
        "merger_norm": "norm",
        "merger_up": "linear_fc1",
        "merger_down": "linear_fc2",
        "deepstack": "deepstack_merger_list.{}",
    }
)


def map_vision(spec: VisionSpec, width: int, names: Mapping[str, str]) -> ParamMap:
    """Map the parameters of a vision tower whose features have ``width`` channels, in the tower's order."""
    names = {**VISION_NAMES, **names}
    tower = spec.tower
    module = ModuleNames("vision", names["vision"], names)
    params = module.tensor("patch_embed.weight", "patch_embed", (tower.hidden_size, *tower.patch_shape))
    if tower.patch_bias:
        params |= module.tensor("patch_embed.bias", "patch_embed", (tower.hidden_size,), suffix="bias")
    if tower.position_side is not None:
        params |= module.tensor("position_table", "position_table", (tower.position_side**2, tower.hidden_size))
    for i in range(tower.num_layers):
        prefix = f"{module.hf_prefix}.{names['vision_block'].format(i)}"
        params |= _map_block(tower, ModuleNames(f"vision.blocks.{i}", prefix, names))
    merged = tower.hidden_size * spec.merge_size**2
    params |= _map_merger(tower.merger, tower.hidden_size, merged, width, module.submodule("merger", "merger"))
    if tower.deepstack_merger is not None:
        for i in range(len(tower.deepstack_layers)):
            prefix = f"{module.hf_prefix}.{names['deepstack'].format(i)}"
            own = ModuleNames(f"vision.deepstack.{i}", prefix, names)
            params |= _map_merger(tower.deepstack_merger, tower.hidden_size, merged, width, own)
    return params


def _map_block(tower: VisionTowerSpec, block: ModuleNames) -> ParamMap:
    width, mlp = tower.hidden_size, tower.mlp
    params = _map_norm(tower.norm, width, block, "attention_norm", "vision_attention_norm")
    heads = {"vision_q": width, "vision_k": width, "vision_v": width}
    params |= block.linear("attention.qkv", heads, width, bias=tower.qkv_bias, fused="vision_qkv")
    params |= block.linear("attention.output", {"vision_o": width}, width, bias=tower.output_bias)
    params |= _map_norm(tower.norm, width, block, "mlp_norm", "vision_mlp_norm")
    rows = {"vision_gate": mlp.size, "vision_up": mlp.size} if mlp.gated else {"vision_up": mlp.size}
    params |= block.linear("mlp.gate_up" if mlp.gated else "mlp.up", rows, width, bias=mlp.bias)
    return params | block.linear("mlp.down", {"vision_down": width}, mlp.size, bias=mlp.bias)


def _map_merger(spec: MergerSpec, size: int, merged: int, width: int, module: ModuleNames) -> ParamMap:
    params = _map_norm(spec.norm, merged if spec.norm_merged else size, module, "norm", "merger_norm")
    params |= module.linear("up", {"merger_up": merged}, merged, bias=True)
    return params | module.linear("down", {"merger_down": width}, merged, bias=True)


def _map_norm(kind: VisionNorm, size: int, module: ModuleNames, name: str, key: str) -> ParamMap:
    params = module.tensor(f"{name}.weight", key, (size,))
    return params | module.tensor(f"{name}.bias", key, (size,), suffix="bias") if kind == "layer" else params
