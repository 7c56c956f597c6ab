"""Hugging Face tensor names and shapes of vision towers. No torch.

``VISION_NAMES`` is what most families call a tensor; a family overrides the entries in which it differs. Names of the
projector (role ``merger``) and those of a class token and a position table are relative to the tower's (``vision``)
unless they begin with a slash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from miles.models.checkpoint.param_slices import HfSlice, ModuleNames, ParamMap, Shape
from miles.models.vision.spec import (
    CLIP_BOUNDS,
    ConvMergerSpec,
    MergerSpec,
    MlpProjectorSpec,
    PoolProjectorSpec,
    ProjectorSpec,
    ScaledPoolProjectorSpec,
    ShuffleProjectorSpec,
    VisionNorm,
    VisionSpec,
    VisionTowerSpec,
)

VISION_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "vision": "model.visual",
        "patch_embed": "patch_embed.proj",
        "position_table": "pos_embed.weight",
        "class_token": "class_token",
        "vision_pre_norm": "pre_norm",
        "vision_post_norm": "post_norm",
        "vision_block": "blocks.{}",
        "vision_attention_norm": "norm1",
        "vision_mlp_norm": "norm2",
        "vision_q": "attn.q_proj",
        "vision_k": "attn.k_proj",
        "vision_v": "attn.v_proj",
        "vision_o": "attn.proj",
        "vision_gate": "mlp.gate_proj",
        "vision_up": "mlp.linear_fc1",
        "vision_down": "mlp.linear_fc2",
        "vision_q_norm": "self_attn.q_norm",
        "vision_k_norm": "self_attn.k_norm",
        "vision_attention_post_norm": "post_attention_layernorm",
        "vision_mlp_post_norm": "post_feedforward_layernorm",
        "vision_attention_scale": "lambda_1",
        "vision_mlp_scale": "lambda_2",
        "merger": "merger",
        "merger_norm": "norm",
        "merger_up": "linear_fc1",
        "merger_down": "linear_fc2",
        "merger_gate": "gate_proj",
        "merger_input": "proj",
        "merger_output": "linear_1",
        "merger_merge": "patch_merger.merging_layer",
        "downsample": "downsample",
        "std_bias": "std_bias",
        "std_scale": "std_scale",
        "deepstack": "deepstack_merger_list.{}",
    }
)


def map_vision(spec: VisionSpec, width: int, names: Mapping[str, str]) -> ParamMap:
    """Map the parameters of a vision tower whose features have ``width`` channels, in the tower's order."""
    names = {**VISION_NAMES, **names}
    tower, hidden = spec.tower, spec.tower.hidden_size
    module = ModuleNames("vision", names["vision"], names)
    patch = (tower.patch_values,) if tower.patch_linear else tower.patch_shape
    params = module.tensor("patch_embed.weight", "patch_embed", (hidden, *patch))
    if tower.patch_bias:
        params |= module.tensor("patch_embed.bias", "patch_embed", (hidden,), suffix="bias")
    if (shape := tower.position_table_shape) is not None:
        params |= _map_tensor("position_table", module, shape)
    if tower.class_token is not None:
        params |= _map_tensor("class_token", module, tower.class_token_shape)
    if tower.pre_norm:
        params |= _map_norm(tower.norm, hidden, module, "pre_norm", "vision_pre_norm")
    for i in range(tower.num_layers):
        prefix = f"{module.hf_prefix}.{names['vision_block'].format(i)}"
        params |= _map_block(tower, ModuleNames(f"vision.blocks.{i}", prefix, names))
    if tower.post_norm:
        params |= _map_norm(tower.norm, hidden, module, "post_norm", "vision_post_norm")
    merger = ModuleNames("vision.merger", _resolve(module, names["merger"]), names)
    params |= _map_projector(tower.projector, spec, width, merger)
    if tower.deepstack_projector is not None:
        for i in range(len(tower.deepstack_layers)):
            prefix = f"{module.hf_prefix}.{names['deepstack'].format(i)}"
            own = ModuleNames(f"vision.deepstack.{i}", prefix, names)
            params |= _map_projector(tower.deepstack_projector, spec, width, own)
    return params


def _resolve(module: ModuleNames, name: str) -> str:
    """Return the full name of what is in a module, or elsewhere if it begins with a slash."""
    return name[1:] if name.startswith("/") else f"{module.hf_prefix}.{name}"


def _map_tensor(name: str, module: ModuleNames, shape: Shape) -> ParamMap:
    return {f"{module.prefix}.{name}": (HfSlice(_resolve(module, module.names[name]), shape, 0, shape[0]),)}


def _map_block(tower: VisionTowerSpec, block: ModuleNames) -> ParamMap:
    width, mlp = tower.hidden_size, tower.mlp
    params = _map_norm(tower.norm, width, block, "attention_norm", "vision_attention_norm")
    heads = {"vision_q": width, "vision_k": width, "vision_v": width}
    params |= block.linear("attention.qkv", heads, width, bias=tower.qkv_bias, fused="vision_qkv")
    params |= block.linear("attention.output", {"vision_o": width}, width, bias=tower.output_bias)
    if tower.qk_norm or tower.scaled_qk_norm:
        params |= block.tensor("attention.q_norm.weight", "vision_q_norm", (tower.head_dim,))
        params |= block.tensor("attention.k_norm.weight", "vision_k_norm", (tower.head_dim,))
    params |= _map_norm(tower.norm, width, block, "mlp_norm", "vision_mlp_norm")
    rows = {"vision_gate": mlp.size, "vision_up": mlp.size} if mlp.gated else {"vision_up": mlp.size}
    params |= block.linear("mlp.gate_up" if mlp.gated else "mlp.up", rows, width, bias=mlp.bias)
    params |= block.linear("mlp.down", {"vision_down": width}, mlp.size, bias=mlp.bias)
    if tower.clipped:
        params |= _map_clips(block, "attention", ("q", "k", "v", "o"))
        params |= _map_clips(block, "mlp", ("gate", "up", "down"))
    if tower.block_post_norms:
        params |= _map_norm(tower.norm, width, block, "attention_post_norm", "vision_attention_post_norm")
        params |= _map_norm(tower.norm, width, block, "mlp_post_norm", "vision_mlp_post_norm")
    if tower.layer_scale:
        params |= block.tensor("attention_scale", "vision_attention_scale", (width,), suffix="")
        params |= block.tensor("mlp_scale", "vision_mlp_scale", (width,), suffix="")
    return params


def _map_clips(block: ModuleNames, part: str, names: Sequence[str]) -> ParamMap:
    """Map the bounds of clipped projections, each a number beside the linear layer."""
    params: ParamMap = {}
    for name in names:
        own = f"{block.hf_prefix}.{block.names[f'vision_{name}']}".removesuffix(".linear")
        for bound in CLIP_BOUNDS:
            params[f"{block.prefix}.{part}.clips.{name}.{bound}"] = (HfSlice(f"{own}.{bound}", (), 0, 1),)
    return params


def _map_projector(projector: ProjectorSpec, spec: VisionSpec, width: int, module: ModuleNames) -> ParamMap:
    hidden = spec.tower.hidden_size
    merged = hidden * spec.merge_size**2
    match projector:
        case MergerSpec():
            size = merged if projector.norm_merged else hidden
            params = _map_norm(projector.norm, size, module, "norm", "merger_norm")
            params |= module.linear("up", {"merger_up": merged}, merged, bias=True)
            return params | module.linear("down", {"merger_down": width}, merged, bias=True)
        case ConvMergerSpec():
            return _map_conv_merger(projector, spec, width, module)
        case MlpProjectorSpec():
            params = {}
            if projector.norm_eps is not None:
                params |= module.tensor("norm.weight", "merger_norm", (hidden,))
            if spec.merge_size > 1:
                params |= module.linear("merge", {"merger_merge": hidden}, merged, bias=False)
            params |= module.linear("up", {"merger_up": width}, hidden, bias=projector.bias)
            return params | module.linear("down", {"merger_down": width}, width, bias=projector.bias)
        case ShuffleProjectorSpec():
            return _map_shuffle(projector, merged, width, module)
        case PoolProjectorSpec():
            params = module.tensor("norm.weight", "merger_norm", (hidden,))
            return params | module.tensor("output.weight", "merger_output", (width, hidden), suffix="", transposed=True)
        case ScaledPoolProjectorSpec():
            params = module.linear("output", {"merger_output": width}, hidden, bias=False)
            if projector.standardize:
                tower = ModuleNames(module.prefix, module.names["vision"], module.names)
                params |= tower.tensor("std_bias", "std_bias", (hidden,), suffix="")
                params |= tower.tensor("std_scale", "std_scale", (hidden,), suffix="")
            return params


def _map_conv_merger(projector: ConvMergerSpec, spec: VisionSpec, width: int, module: ModuleNames) -> ParamMap:
    conv = (width, spec.tower.hidden_size, spec.merge_size, spec.merge_size)
    tower = ModuleNames(module.prefix, module.names["vision"], module.names)
    params = tower.tensor("downsample", "downsample", conv)
    params |= tower.tensor("downsample_bias", "downsample", (width,), suffix="bias")
    params |= module.linear("input", {"merger_input": width}, width, bias=False)
    params |= _map_norm("layer", width, module, "norm", "merger_norm")
    rows = {"merger_gate": projector.size, "merger_up": projector.size}
    params |= module.linear("mlp.gate_up", rows, width, bias=False)
    return params | module.linear("mlp.down", {"merger_down": width}, projector.size, bias=False)


def _map_shuffle(projector: ShuffleProjectorSpec, merged: int, width: int, module: ModuleNames) -> ParamMap:
    match projector.kind:
        case "linear":
            return module.linear("output", {"merger_output": width}, merged, bias=False)
        case "mlp":
            params = _map_norm("layer", merged, module, "norm", "merger_norm")
            params |= module.linear("up", {"merger_up": width}, merged, bias=True)
            return params | module.linear("output", {"merger_output": width}, width, bias=True)
        case "adapter":
            inner, outer = projector.inner, projector.outer
            adapter = ModuleNames(module.prefix, module.names["vision"], module.names)
            params = adapter.linear("up", {"merger_up": inner}, merged, bias=False)
            params |= adapter.linear("down", {"merger_down": outer}, inner, bias=False)
            return params | module.linear("output", {"merger_output": width}, outer, bias=False)


def _map_norm(kind: VisionNorm, size: int, module: ModuleNames, name: str, key: str) -> ParamMap:
    params = module.tensor(f"{name}.weight", key, (size,))
    return params | module.tensor(f"{name}.bias", key, (size,), suffix="bias") if kind == "layer" else params
