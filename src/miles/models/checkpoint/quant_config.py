"""Quantization config of a checkpoint: how config.json says that weights are quantized, module by module. No torch.

Methods: ``fp8`` (DeepSeek, Qwen), ``mxfp4`` (gpt-oss), ``compressed-tensors``, ``modelopt``, ``awq`` and ``gptq``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from miles.core.errors import UsageError
from miles.precision.formats import ElementType

__all__ = ["QuantConfig", "QuantMethod", "WeightScheme", "read_quant_config"]

QuantMethod = Literal["fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq"]
_METHODS: tuple[QuantMethod, ...] = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq")

_CONFIG = "quantization_config"
_ADVICE = "use a checkpoint in another format or in bfloat16"
_ELEMENTS: Mapping[tuple[str, int], ElementType] = {
    ("float", 8): "e4m3",
    ("float", 4): "e2m1",
    ("int", 8): "int8",
    ("int", 4): "int4",
}
_COMPRESSED_FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Elements of a weight and the block (``rows``, ``columns``) that shares a scale; None is all of them.

    ``zero_point``: integers are asymmetric. ``global_scale``: a matrix has one more factor. ``act_order``: a column's
    group is in ``g_idx``. ``zero_offset`` is added to stored zero points.
    """

    element: ElementType
    rows: int | None = None
    columns: int | None = None
    zero_point: bool = False
    global_scale: bool = False
    act_order: bool = False
    zero_offset: int = 0


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How a config says the weights are quantized: ``groups`` are targets and the scheme of modules that match one."""

    method: QuantMethod
    groups: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignore: tuple[str, ...] = ()

    def scheme_for(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module by its name, or None: a name goes before a pattern, and that before a class."""
        if any(_name_matches(entry, module) for entry in self.ignore):
            return None
        for matches in (str.__eq__, _name_matches, _is_class_name):
            for targets, scheme in self.groups:
                if any(matches(target, module) for target in targets):
                    return scheme
        return None


def _name_matches(target: str, module: str) -> bool:
    return re.match(target[3:], module) is not None if target.startswith("re:") else target == module


def _is_class_name(target: str, module: str) -> bool:
    """Whether the target is a class of modules, as in "Linear": all weights that are quantized are of that class."""
    return target[:1].isupper() and "." not in target


_EVERY = ("Linear",)


def read_quant_config(config: Mapping[str, Any]) -> QuantConfig | None:
    """Read how the weights are quantized, or None; unsupported methods are a UsageError."""
    inner = config.get("text_config") or {}
    quant = config.get(_CONFIG) or inner.get(_CONFIG) or config.get("compression_config")
    if not quant:
        return None
    method = quant.get("quant_method")
    match method:
        case "mxfp4":
            return QuantConfig("mxfp4", ((_EVERY, WeightScheme(element="e2m1", rows=1, columns=32)),))
        case "fp8":
            return QuantConfig("fp8", ((_EVERY, _read_fp8(quant)),))
        case "compressed-tensors":
            return _read_compressed_tensors(quant)
        case "modelopt":
            return QuantConfig("modelopt", ((_EVERY, _read_modelopt(quant)),))
        case "awq":
            return QuantConfig("awq", ((_EVERY, _read_awq(quant)),))
        case "gptq":
            return QuantConfig("gptq", ((_EVERY, _read_gptq(quant)),))
        case _:
            names = ", ".join(_METHODS[:-1])
            raise _unsupported_error("quant_method", method, f"{names} and {_METHODS[-1]}")


def _unsupported_error(key: str, value: object, supported: str) -> UsageError:
    return UsageError(f"{_CONFIG}.{key} of config.json is {value!r}, but only {supported} are supported: {_ADVICE}.")


def _read_block(key: str, block: object) -> tuple[int, int]:
    if isinstance(block, list | tuple):
        sizes = [n for n in cast("list[object]", block) if isinstance(n, int) and n > 0]
        if len(sizes) == 2 == len(cast("list[object]", block)):
            return sizes[0], sizes[1]
    raise UsageError(f"{_CONFIG}.{key} of config.json is {block!r}, but must be two positive integers.")


def _read_fp8(quant: Mapping[str, Any]) -> WeightScheme:
    if quant.get("weight_block_size") is None:
        return WeightScheme(element="e4m3")
    rows, columns = _read_block("weight_block_size", quant["weight_block_size"])
    return WeightScheme(element="e4m3", rows=rows, columns=columns)


# -- compressed-tensors -----------------------------------------------------------------------


def _read_compressed_tensors(quant: Mapping[str, Any]) -> QuantConfig:
    if quant.get("format", _COMPRESSED_FORMATS[0]) not in _COMPRESSED_FORMATS:
        raise _unsupported_error("format", quant["format"], ", ".join(_COMPRESSED_FORMATS))
    for key in ("sparsity_config", "transform_config"):
        content = quant.get(key) or {}
        if content.get("config_groups") or content.get("format", "dense") != "dense":
            raise UsageError(f"{_CONFIG}.{key} of config.json is set, but not supported: {_ADVICE}.")
    groups: list[tuple[tuple[str, ...], WeightScheme]] = []
    for name, group in (quant.get("config_groups") or {}).items():
        key = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _unsupported_error(key, group, "groups with targets and weights")
        group = cast("Mapping[str, Any]", group)
        if group.get("weights") is not None:
            groups.append(
                (tuple(group.get("targets") or _EVERY), _read_weight_args(f"{key}.weights", group["weights"]))
            )
    return QuantConfig("compressed-tensors", tuple(groups), tuple(quant.get("ignore") or ()))


def _read_weight_args(key: str, args: Mapping[str, Any]) -> WeightScheme:
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    element = _ELEMENTS.get((kind, bits))
    if element is None:
        raise _unsupported_error(f"{key}.num_bits", f"{bits} {kind}", "8 and 4 with type float or int")
    if args.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported_error(f"{key}.actorder", args["actorder"], "null and 'weight'")
    symmetric = args.get("symmetric", True)
    if not symmetric and element != "int4":
        raise _unsupported_error(f"{key}.symmetric", symmetric, "false with 4 bits and true")
    group = args.get("group_size")
    strategy = args.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    match strategy:
        case "tensor":
            return WeightScheme(element=element, zero_point=not symmetric)
        case "channel":
            return WeightScheme(element=element, rows=1, zero_point=not symmetric)
        case "block":
            rows, columns = _read_block(f"{key}.block_structure", args.get("block_structure"))
            return WeightScheme(element=element, rows=rows, columns=columns, zero_point=not symmetric)
        case "group" | "tensor_group":
            columns = _read_group_size(f"{key}.group_size", group)
            is_global = strategy == "tensor_group"
            return WeightScheme(
                element=element, rows=1, columns=columns, zero_point=not symmetric, global_scale=is_global
            )
        case _:
            raise _unsupported_error(f"{key}.strategy", strategy, "tensor, channel, group, tensor_group and block")


def _read_group_size(key: str, size: object) -> int:
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"{_CONFIG}.{key} of config.json is {size!r}, but must be a positive integer.")
    return size


# -- modelopt, AWQ, GPTQ ----------------------------------------------------------------------


def _read_modelopt(quant: Mapping[str, Any]) -> WeightScheme:
    match quant.get("quant_algo"):
        case "FP8":
            return WeightScheme(element="e4m3")
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return WeightScheme(element="e4m3", rows=1)
        case "NVFP4":
            return WeightScheme(element="e2m1", rows=1, columns=quant.get("group_size") or 16, global_scale=True)
        case other:
            raise _unsupported_error("quant_algo", other, "FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4")


def _read_awq(quant: Mapping[str, Any]) -> WeightScheme:
    bits, version = quant.get("bits", quant.get("w_bit", 4)), quant.get("version", "gemm")
    if bits != 4:
        raise _unsupported_error("bits", bits, "4 bits in awq")
    if str(version).lower() != "gemm":
        raise _unsupported_error("version", version, "weights in the layout 'gemm'")
    if not quant.get("zero_point", True):
        raise _unsupported_error("zero_point", False, "awq weights with zero points")
    return WeightScheme(element="int4", rows=1, columns=_read_columns(quant, "q_group_size"), zero_point=True)


def _read_gptq(quant: Mapping[str, Any]) -> WeightScheme:
    bits, layout = quant.get("bits", 4), quant.get("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise _unsupported_error("bits", bits, "4 and 8 bits in gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _unsupported_error("checkpoint_format", layout, "'gptq' and 'gptq_v2'")
    if quant.get("dynamic"):
        raise UsageError(f"{_CONFIG}.dynamic of config.json is set, but not supported: {_ADVICE}.")
    return WeightScheme(
        element="int4" if bits == 4 else "int8",
        rows=1,
        columns=_read_columns(quant, "group_size"),
        zero_point=not quant.get("sym", True),
        act_order=bool(quant.get("desc_act", False)),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _read_columns(quant: Mapping[str, Any], older: str) -> int | None:
    size = quant.get("group_size", quant.get(older, 128))
    return None if size == -1 else _read_group_size("group_size", size)
