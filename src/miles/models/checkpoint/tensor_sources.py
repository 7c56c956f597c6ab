"""Tensor sources: the file position and quantization format of each slice of each parameter, checked on headers. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from miles.core.errors import CheckpointError
from miles.models.checkpoint import param_map
from miles.models.checkpoint.param_slices import HfSlice, Shape, param_shape
from miles.models.checkpoint.quant_config import QuantConfig, WeightScheme, read_quant_config
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor
from miles.models.checkpoint.tensor_formats import (
    AwqTensor,
    GptqTensor,
    Mxfp4Tensor,
    PackedTensor,
    PlainTensor,
    QuantizedFormat,
    ScaledTensor,
    TensorFormat,
    main_tensor,
)
from miles.models.families.registry import find_family
from miles.models.spec import DecoderSpec

__all__ = ["FLOATS", "ParamSource", "PlainTensor", "locate_params", "locate_tensors", "read_quant_config"]

FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_FP8 = "F8_E4M3"
_NARROW = {"e4m3": _FP8, "int8": "I8"}
# Values that share a scale in MXFP4, and their size in bytes.
_GROUP, _GROUP_BYTES = 32, 16
# Suffixes of the tensors of a quantized weight, beside the weight's own name.
_QUANT_SUFFIXES = (
    "_scale_inv",
    "_blocks",
    "_scales",
    "_packed",
    "_scale",
    "_scale_2",
    "_shape",
    "_zero_point",
    "_global_scale",
)
# The same of AWQ and GPTQ, instead of ``weight``.
_INTEGER_PARTS = ("qweight", "qzeros", "scales", "g_idx")
# Scales of quantized inputs and of a quantized KV cache, which are not used.
_INPUT_SCALES = ("activation_scale", "input_scale", "input_global_scale", "input_zero_point")
_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale", "output_scale")


@dataclass(frozen=True, slots=True)
class ParamSource:
    """A slice of a decoder parameter and where it is read from."""

    piece: HfSlice
    tensor: TensorFormat

    @property
    def is_transposed(self) -> bool:
        """Whether its last two dimensions are swapped on disk."""
        return self.piece.transposed != isinstance(self.tensor, Mxfp4Tensor | AwqTensor | GptqTensor)

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the byte where reading it begins."""
        stored = main_tensor(self.tensor)
        return stored.file, stored.start


def locate_tensors(
    spec: DecoderSpec, stored: Mapping[str, StoredTensor], quant: QuantConfig | None, folder: Path
) -> dict[str, tuple[ParamSource, ...]]:
    """Return what to read for each parameter, in the order of the files.

    Anything missing, unknown, mis-shaped or in an undeclared format is a CheckpointError.
    """
    family = find_family(spec.family)
    stored = {family.published_name(name): tensor for name, tensor in stored.items()}
    search = _Search(stored, quant, folder)
    found = search.find_all(param_map.build_param_map(spec), param_map.stacked_expert_names(spec))
    search.check_unused(spec)
    return found


def locate_params(
    params: Mapping[str, tuple[HfSlice, ...]],
    stacked: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    quant: QuantConfig | None,
    folder: Path,
) -> dict[str, tuple[ParamSource, ...]]:
    """``locate_tensors`` of some parameters of a checkpoint, whatever else is in it.

    ``stacked`` are the tensors under which the experts of a parameter may be stored instead.
    """
    return _Search(stored, quant, folder).find_all(params, stacked)


def _transpose_as_stored(piece: HfSlice, stored: Mapping[str, StoredTensor]) -> HfSlice:
    """Return a transposed slice as one that is not, if the stored tensor has the shape of such a one.

    Some tools save stacked experts with outputs before inputs where the published checkpoint has inputs first.
    """
    swapped = (*piece.shape[:-2], piece.shape[-1], piece.shape[-2]) if piece.transposed else piece.shape
    if swapped == piece.shape or piece.hf_name not in stored or stored[piece.hf_name].shape != swapped:
        return piece
    return replace(piece, shape=swapped, transposed=False)


def is_kv_cache_scale(name: str) -> bool:
    """Return whether a tensor is a scale of a quantized KV cache.

    >>> is_kv_cache_scale("model.layers.0.self_attn.k_proj.k_scale")
    True
    """
    return name.rpartition(".")[2] in _KV_SCALES


class _Search:
    """Looks up tensors by name and tracks which were used."""

    def __init__(self, stored: Mapping[str, StoredTensor], quant: QuantConfig | None, folder: Path) -> None:
        self._stored = stored
        self._quant = quant
        self._folder = folder
        self._used: set[str] = set()

    def find_all(
        self, params: Mapping[str, tuple[HfSlice, ...]], stacked: Mapping[str, str]
    ) -> dict[str, tuple[ParamSource, ...]]:
        """Return the sources of each parameter, in the order of the files."""
        found: dict[str, tuple[ParamSource, ...]] = {}
        for param, pieces in params.items():
            if stacked.get(param) in self._stored:
                shape = param_shape(pieces)
                pieces = (HfSlice(stacked[param], shape, 0, shape[0]),)
            pieces = tuple(_transpose_as_stored(piece, self._stored) for piece in pieces)
            found[param] = tuple(ParamSource(piece, self.find(piece)) for piece in pieces)
        return dict(sorted(found.items(), key=lambda item: min(source.place for source in item[1])))

    def find(self, piece: HfSlice) -> TensorFormat:
        name, shape = piece.hf_name, piece.shape
        if piece.integer:
            return PlainTensor(self._take(name, shape, "config.json requires it", *_INTEGERS))
        plain = self._stored.get(name)
        if (plain is None or plain.dtype not in FLOATS) and len(shape) in (2, 3):
            quantized = self._find_quantized(name, shape, plain)
            if quantized is not None:
                return quantized
        stored = self._take(name, shape, "config.json requires it")
        if stored.dtype in FLOATS:
            return PlainTensor(stored)
        if stored.dtype in (_FP8, "I8", "U8"):
            raise CheckpointError(
                f"{name} in {stored.file} is stored as {stored.dtype}, but config.json has no such quantization_config."
            )
        raise CheckpointError(f"{name} in {stored.file} is stored as {stored.dtype}, not {', '.join(FLOATS)}.")

    def _find_quantized(self, name: str, shape: Shape, weight: StoredTensor | None) -> QuantizedFormat | None:
        """Return the tensors of a quantized weight; None if none are stored under the names of the config's method."""
        quant = self._quant
        scheme = None if quant is None else quant.scheme_for(name.removesuffix(".weight"))
        if quant is None or scheme is None:
            return None
        if weight is not None and weight.dtype == _NARROW.get(scheme.element):
            suffix = "_scale_inv" if quant.method == "fp8" else "_scale"
            return self._find_scaled(name, shape, scheme, suffix)
        base = name.removesuffix("weight")
        match quant.method:
            case "mxfp4" if f"{name}_blocks" in self._stored:
                return self._find_mxfp4(name, shape)
            case "compressed-tensors" if f"{name}_packed" in self._stored:
                return self._find_packed(name, _matrix(name, shape), scheme)
            case "modelopt" if scheme.element == "e2m1" and weight is not None and weight.dtype == "U8":
                return self._find_modelopt_nvfp4(name, _matrix(name, shape), scheme)
            case "awq" if f"{base}qweight" in self._stored:
                return self._find_awq(base, _matrix(name, shape), scheme)
            case "gptq" if f"{base}qweight" in self._stored:
                return self._find_gptq(base, _matrix(name, shape), scheme)
            case _:
                return None

    def _find_scaled(self, name: str, shape: Shape, scheme: WeightScheme, suffix: str) -> ScaledTensor:
        stored = self._take(name, shape, "config.json requires it")
        scale = f"{name}{suffix}"
        *lead, rows, columns = shape
        why = f"{name} in {stored.file} is stored as {stored.dtype} and needs it"
        block = (scheme.rows or rows, scheme.columns or columns)
        grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        if scheme.rows is None or scheme.columns is None:
            found = self._take(scale, None, why)
            if math.prod(found.shape) != math.prod(grid):
                each = "matrix" if scheme.rows is None else "row"
                raise CheckpointError(
                    f"{scale} in {found.file} has shape {found.shape}, but {name} needs one scale a {each}."
                )
        else:
            found = self._take(scale, grid, why)
        if found.dtype not in (*FLOATS, "F8_E8M0", *(("U8",) if scheme.columns == _GROUP else ())):
            raise CheckpointError(
                f"{scale} in {found.file} is stored as {found.dtype}, but scales are {', '.join(FLOATS)} or F8_E8M0."
            )
        return ScaledTensor(stored, found, block, scale)

    def _find_mxfp4(self, name: str, shape: Shape) -> Mxfp4Tensor:
        *lead, columns, rows = shape
        if columns % _GROUP:
            raise CheckpointError(
                f"{name}_blocks in {self._folder} hold rows of {columns} values, which is not a multiple of 32."
            )
        groups = (*lead, rows, columns // _GROUP)
        blocks = self._take(f"{name}_blocks", (*groups, _GROUP_BYTES), "config.json requires it", "U8")
        scales = self._take(f"{name}_scales", groups, f"{name}_blocks needs it", "U8")
        return Mxfp4Tensor(blocks, scales)

    def _find_packed(self, name: str, shape: tuple[int, int], scheme: WeightScheme) -> PackedTensor:
        """compressed-tensors: ``weight_packed`` with ``weight_scale`` and, by the scheme, further tensors."""
        rows, columns = shape
        why = f"{name}_packed needs it"
        groups = self._count_groups(name, columns, scheme)
        if scheme.element == "e2m1":
            packed = self._take(f"{name}_packed", (rows, columns // 2), "config.json requires it", "U8")
            scales = ("F8_E4M3",) if scheme.global_scale else ("U8", "F8_E8M0")
            scale = self._take(f"{name}_scale", (rows, groups), why, *scales)
            total = self._take(f"{name}_global_scale", None, why, *FLOATS) if scheme.global_scale else None
            return PackedTensor(name, packed, scale, scheme, global_scale=total, divides=True)
        if f"{name}_g_idx" in self._stored:
            raise CheckpointError(
                f"{name}_g_idx in {self._stored[f'{name}_g_idx'].file} reorders columns, which is not supported; use a "
                "checkpoint without activation ordering."
            )
        each = 32 // (4 if scheme.element == "int4" else 8)
        packed = self._take(f"{name}_packed", (rows, -(-columns // each)), "config.json requires it", "I32")
        scale = self._take(f"{name}_scale", (rows, groups), why, *FLOATS)
        if f"{name}_shape" in self._stored:
            self._take(f"{name}_shape", (2,), why)
        zero = None
        if scheme.zero_point:
            zero = self._take(f"{name}_zero_point", (-(-rows // each), groups), why, "I32")
        return PackedTensor(name, packed, scale, scheme, zero)

    def _find_modelopt_nvfp4(self, name: str, shape: tuple[int, int], scheme: WeightScheme) -> PackedTensor:
        rows, columns = shape
        groups = self._count_groups(name, columns, scheme)
        packed = self._take(name, (rows, columns // 2), "config.json requires it", "U8")
        scale = self._take(f"{name}_scale", (rows, groups), f"{name} needs it", "F8_E4M3")
        total = self._take(f"{name}_scale_2", None, f"{name} needs it", *FLOATS)
        if f"{name.removesuffix('weight')}pre_quant_scale" in self._stored:
            raise CheckpointError(f"{name} has a pre_quant_scale, which is not supported; use a checkpoint without it.")
        return PackedTensor(name, packed, scale, scheme, global_scale=total)

    def _find_awq(self, base: str, shape: tuple[int, int], scheme: WeightScheme) -> AwqTensor:
        rows, columns = shape
        groups, why = self._count_groups(f"{base}qweight", columns, scheme), f"{base}qweight needs it"
        qweight = self._take(f"{base}qweight", (columns, rows // 8), "config.json requires it", "I32")
        qzeros = self._take(f"{base}qzeros", (groups, rows // 8), why, "I32")
        scales = self._take(f"{base}scales", (groups, rows), why, *FLOATS)
        return AwqTensor(base, qweight, qzeros, scales, scheme.columns or columns)

    def _find_gptq(self, base: str, shape: tuple[int, int], scheme: WeightScheme) -> GptqTensor:
        rows, columns = shape
        each = 8 if scheme.element == "int4" else 4
        groups, why = self._count_groups(f"{base}qweight", columns, scheme), f"{base}qweight needs it"
        qweight = self._take(f"{base}qweight", (columns // each, rows), "config.json requires it", "I32")
        qzeros = self._take(f"{base}qzeros", (groups, rows // each), why, "I32")
        scales = self._take(f"{base}scales", (groups, rows), why, *FLOATS)
        g_idx = None
        if scheme.act_order or f"{base}g_idx" in self._stored:
            g_idx = self._take(f"{base}g_idx", (columns,), why, "I32")
        return GptqTensor(base, qweight, qzeros, scales, g_idx, scheme, scheme.columns or columns)

    def _count_groups(self, name: str, columns: int, scheme: WeightScheme) -> int:
        group = scheme.columns or columns
        if columns % group:
            raise CheckpointError(
                f"{name} in {self._folder} has rows of {columns} values, which is not a multiple of its group size "
                f"{group}."
            )
        return columns // group

    def _take(self, name: str, shape: Shape | None, why: str, *dtypes: str) -> StoredTensor:
        """Return the tensor of that name; of that shape and of one of these dtypes, if any are given."""
        if name not in self._stored:
            expected = "" if shape is None else f", shape {shape}"
            raise CheckpointError(f"{name} is missing from {self._folder}: {why}{expected}.")
        stored = self._stored[name]
        if shape is not None and stored.shape != shape:
            raise CheckpointError(f"{name} in {stored.file} has shape {stored.shape}, but config.json says {shape}.")
        if dtypes and stored.dtype not in dtypes:
            raise CheckpointError(f"{name} in {stored.file} is stored as {stored.dtype}, not {' or '.join(dtypes)}.")
        self._used.add(name)
        return stored

    def check_unused(self, spec: DecoderSpec) -> None:
        """Raise an error for any unused tensor that carries information."""
        for name, stored in self._stored.items():
            if name not in self._used and not self._is_ignorable(spec, name):
                raise CheckpointError(f"{name} in {stored.file} belongs to no part of a {spec.family} decoder.")

    def _is_ignorable(self, spec: DecoderSpec, name: str) -> bool:
        if param_map.is_ignorable(spec, name):
            return True
        if self._quant is None:
            return False
        module, _, suffix = name.rpartition(".")
        weight = f"{module}.weight"
        if suffix in _INPUT_SCALES:
            values = (weight, f"{weight}_packed", f"{module}.qweight")
            return any(part in self._used for part in values) or param_map.is_ignorable(spec, weight)
        if suffix == "bias" and f"{module}.qweight" in self._used:  # GPTQ tools add biases of zeros
            return _is_zero(name, self._stored[name])
        if suffix in _INTEGER_PARTS and param_map.is_ignorable(spec, weight):
            return True
        return is_kv_cache_scale(name) or any(
            name.endswith(end) and param_map.is_ignorable(spec, name.removesuffix(end)) for end in _QUANT_SUFFIXES
        )


def _is_zero(name: str, stored: StoredTensor) -> bool:
    content = bytearray(stored.stop - stored.start)
    with FileReader() as reader:
        reader.read(name, stored.file, stored.start, memoryview(content))
    return not any(content)


def _matrix(name: str, shape: Shape) -> tuple[int, int]:
    if len(shape) != 2:
        raise CheckpointError(f"{name} is a stack of {shape[0]} quantized matrices, which is not supported.")
    return shape[0], shape[1]
