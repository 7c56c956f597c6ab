"""The ``quantization_config`` of a checkpoint that is written quantized: fp8, mxfp4 or compressed-tensors. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from miles.models.checkpoint.param_slices import HfSlice
from miles.precision.formats import WeightFormat

__all__ = ["build_quantization_config"]

_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def build_quantization_config(
    method: str, pieces: Mapping[str, Sequence[HfSlice]], formats: Mapping[str, WeightFormat], extra: Sequence[str]
) -> dict[str, Any]:
    """Build the config: ``pieces`` are those of every parameter, ``formats`` those of the quantized ones.

    ``extra`` are further weights of the checkpoint, which are not quantized.
    """
    wide = [p for name, own in pieces.items() if name not in formats for p in own if _is_linear(p)]
    if method == "fp8":
        kept = dict.fromkeys([_module_prefix(piece) for piece in wide] + [_module(name) for name in extra])
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(kept),
            **({"scale_fmt": "ue8m0"} if all(f.power_of_two for f in formats.values()) else {}),
        }
    if method == "mxfp4":
        kept = dict.fromkeys(_module(piece.hf_name) for piece in wide)
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(kept)}
    return _build_compressed_tensors(pieces, formats, [*map(_pattern, wide), *map(_module, extra)])


def _build_compressed_tensors(
    pieces: Mapping[str, Sequence[HfSlice]], formats: Mapping[str, WeightFormat], ignore: Sequence[str]
) -> dict[str, Any]:
    used = {format.name: format for format in formats.values()}
    groups: dict[str, dict[str, Any]] = {}
    for number, (name, format) in enumerate(used.items()):
        modules = [_pattern(p) for param, own in pieces.items() if _format_name(formats, param) == name for p in own]
        targets = ["Linear"] if len(used) == 1 else list(dict.fromkeys(modules))
        groups[f"group_{number}"] = {"targets": targets, **_build_group(format)}
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dict.fromkeys(ignore)),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format_name(formats: Mapping[str, WeightFormat], param: str) -> str | None:
    return formats[param].name if param in formats else None


def _build_group(format: WeightFormat) -> dict[str, Any]:
    """Weights, inputs and layout of a group, as compressed-tensors names them."""
    integer = format.element in ("int4", "int8")
    weights: dict[str, Any] = {
        "num_bits": format.bits,
        "type": "int" if integer else "float",
        "symmetric": not format.zero_point,
        "dynamic": False,
        "observer": "minmax",
    }
    if format.rows is None:
        weights["strategy"] = "tensor"
    elif format.columns is None:
        weights["strategy"] = "channel"
    elif format.rows != 1:
        weights |= {"strategy": "block", "block_structure": [format.rows, format.columns]}
    else:
        weights |= {"strategy": "tensor_group" if format.global_scale else "group", "group_size": format.columns}
    if format.scale in ("e8m0", "e4m3"):
        weights["scale_dtype"] = "torch.uint8" if format.scale == "e8m0" else "torch.float8_e4m3fn"
    return {"weights": weights, "input_activations": _build_inputs(format), "format": _layout_name(format)}


def _build_inputs(format: WeightFormat) -> dict[str, Any] | None:
    if not format.quantizes_activations:
        return None
    if format.activation_columns is None:
        return dict(_TOKEN)
    inputs = _TOKEN | {"strategy": "group", "group_size": format.activation_columns}
    return inputs | ({"scale_dtype": "torch.uint8"} if format.scale == "e8m0" else {})


def _layout_name(format: WeightFormat) -> str:
    match format.element:
        case "e4m3":
            return "mxfp8-quantized" if format.scale == "e8m0" else "float-quantized"
        case "e2m1":
            return "nvfp4-pack-quantized" if format.global_scale else "mxfp4-pack-quantized"
        case _:
            return "pack-quantized"


def _is_linear(piece: HfSlice) -> bool:
    """Whether the piece is the weight of a linear layer, as transformers has it."""
    is_convolution = len(piece.shape) == 3 and piece.shape[1] == 1
    return len(piece.shape) >= 2 and not piece.row and not is_convolution and "embed" not in piece.hf_name


def _module(hf_name: str) -> str:
    return hf_name.removesuffix(".weight")


def _module_prefix(piece: HfSlice) -> str:
    """The module's name; that of all experts for one of them."""
    module = _module(piece.hf_name)
    return module if piece.expert is None else module.rpartition(f".{piece.expert}.")[0]


def _pattern(piece: HfSlice) -> str:
    """The module's name; a pattern of all experts for one of them."""
    module = _module(piece.hf_name)
    if piece.expert is None:
        return module
    head, number, tail = module.rpartition(f".{piece.expert}.")
    assert number, f"{module} has no expert number"
    return f"re:{re.escape(head)}\\.\\d+\\.{re.escape(tail)}"
