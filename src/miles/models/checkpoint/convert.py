"""Checkpoint conversion between precisions: read, quantize or dequantize and write one matrix at a time.

The target is written into a hidden folder beside it, which takes its name when it is complete. Its ``conversion.json``
lists the SHA-256 of every tensor that was read and written. LoRA adapters may be merged into the weights on the way.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import UsageError
from miles.models.checkpoint import param_map, peft
from miles.models.checkpoint.load import ParamReader
from miles.models.checkpoint.packed import read_packed_segments
from miles.models.checkpoint.param_slices import HfSlice, weight_segments
from miles.models.checkpoint.quant_config import read_quant_config
from miles.models.checkpoint.safetensors_io import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    TensorHeader,
    encode_header,
    read_config,
    shard_file_name,
    stored_tensors,
    write_json,
)
from miles.models.checkpoint.save import SHARD_BYTES, read_stored_bytes
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit, plan_save
from miles.models.checkpoint.tensor_formats import stored_parts
from miles.models.checkpoint.tensor_sources import ParamSource, locate_tensors
from miles.models.families import spec_from_config
from miles.models.lora.adapters import LoraAdapters, ParamPart, read_adapter
from miles.models.quantization import plan_quantization
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec, WeightFormat

__all__ = ["RECEIPT", "Conversion", "Progress", "SafetensorsOutput", "convert_checkpoint", "plan_conversion"]

RECEIPT = "conversion.json"

# Bytes of a parameter that is not quantized, read and written at a time.
_CHUNK_BYTES = 64 << 20

_HASH_THREADS = 2

Progress = Callable[[str, int, int], None]
"""Called with the parameter that is next, and the bytes written so far and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is read and what is written: ``left_out`` are the tensors of the source that are not written.

    ``adapters`` are merged into the weights, one after the other.
    """

    source: Path
    stored: Mapping[str, StoredTensor]
    sources: Mapping[str, Sequence[ParamSource]]
    plan: SavePlan
    formats: Mapping[str, WeightFormat] = field(default_factory=dict[str, WeightFormat])
    left_out: tuple[str, ...] = ()
    adapters: tuple[LoraAdapters, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that are written."""
        extra = sum(stored.stop - stored.start for _, stored in self.plan.extra_tensors)
        return extra + sum(header.nbytes for unit in self.plan.units for header in unit.headers())


def plan_conversion(
    source: Path,
    *,
    format: WeightFormat | None,
    dtype: torch.dtype,
    keep: Sequence[str] = (),
    quantization: QuantizationSpec | None = None,
    adapters: Sequence[Path] = (),
) -> Conversion:
    """Check the source on its headers and plan the target: ``format`` None is ``dtype`` throughout.

    Otherwise ``dtype`` is that of what is not quantized: what is not by default, and modules that match a pattern in
    ``keep``; or all but what ``quantization``, that of an engine, quantizes. ``adapters`` are PEFT folders. A
    CheckpointError or UsageError says what cannot be read or written.
    """
    config = read_config(source)
    spec = spec_from_config(config)
    stored = stored_tensors(source)
    sources = locate_tensors(spec, stored, read_quant_config(config), source)
    formats = {} if format is None else _choose_formats(spec, format, keep)
    if quantization is not None:
        quantized = plan_quantization(replace(spec, quantization=quantization))
        formats = {name: param.format for name, param in quantized.items()}
    plan = plan_save(spec, dtype=dtype, like=source, config=config, formats=formats)
    used = {(part.file, part.start) for own in sources.values() for s in own for part in stored_parts(s.tensor)}
    used |= {(extra.file, extra.start) for _, extra in plan.extra_tensors}
    left_out = tuple(name for name, tensor in stored.items() if (tensor.file, tensor.start) not in used)
    return Conversion(
        source=source,
        stored=stored,
        sources=sources,
        plan=plan,
        formats=formats,
        left_out=left_out,
        adapters=tuple(_load_adapters(folder, spec) for folder in adapters),
    )


def _load_adapters(folder: Path, spec: DecoderSpec) -> LoraAdapters:
    lora = peft.find_adapter(folder, spec).lora
    adapters = LoraAdapters(lora, device=torch.device("cpu"), seed=0)
    adapters.load(read_adapter(folder, lora))
    return adapters


def _choose_formats(spec: DecoderSpec, format: WeightFormat, keep: Sequence[str]) -> dict[str, WeightFormat]:
    # FP8 fits every shape: a shape that the format does not allow is named by the tensor that has it.
    every = replace(spec, quantization=QuantizationSpec(format=FORMATS["fp8"], packed=True))
    pieces = param_map.build_param_map(spec)
    names = list(plan_quantization(every))
    stacked = [name for name in names if any(len(piece.shape) == 3 for piece in pieces[name])]
    if stacked and format.name == "mxfp4":  # gpt-oss publishes its experts so, and nothing else
        names = stacked
    unmatched = [p for p in keep if not any(_matches(p, piece) for own in pieces.values() for piece in own)]
    if unmatched:
        raise UsageError(f"--keep {unmatched[0]} matches no weight of the model; name modules as in the checkpoint.")
    return {name: format for name in names if not any(_matches(p, piece) for p in keep for piece in pieces[name])}


def _matches(pattern: str, piece: HfSlice) -> bool:
    """Whether a pattern is the name of a weight, of its module, of a part of that name, or one with wildcards."""
    return any(fnmatchcase(f".{piece.hf_name}.", each) for each in (f"*.{pattern}.*", f"*.{pattern}.weight."))


def convert_checkpoint(
    conversion: Conversion, target: Path, *, progress: Progress | None = None, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the target, whose folder must not exist; nothing is left of it if that fails."""
    with draft_folder(target) as draft:
        _write(conversion, draft, progress or ignore_progress, max_shard_bytes)


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A hidden folder that becomes ``target`` at the end, or is removed."""
    if target.exists():
        raise UsageError(f"{target} exists already; name a folder that does not.")
    draft = target.with_name(f".{target.name}.partial")
    if draft.exists():
        shutil.rmtree(draft)  # of a conversion that was killed
    draft.mkdir(parents=True)
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def ignore_progress(name: str, done: int, total: int) -> None:
    del name, done, total


def _write(conversion: Conversion, draft: Path, progress: Progress, max_shard_bytes: int) -> None:
    plan = conversion.plan
    extra = [TensorHeader(name, s.dtype, s.shape, s.stop - s.start) for name, s in plan.extra_tensors]
    headers = [header for unit in plan.units for header in unit.headers()] + extra
    names = {(tensor.file, tensor.start): name for name, tensor in conversion.stored.items()}
    hashes: dict[str, Future[str]] = {}
    with (
        ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="hash") as pool,
        ParamReader("cpu") as params,
        SafetensorsOutput(draft, headers, max_shard_bytes, pool) as output,
    ):
        for unit in plan.units:
            progress(unit.name, output.done_bytes, conversion.total_bytes)
            sources = conversion.sources[unit.name]
            parts = dict.fromkeys(part for source in sources for part in stored_parts(source.tensor))
            own = {names[part.file, part.start]: part for part in parts}
            # While the weights are converted: the second read of their bytes is from memory.
            hashes |= {name: pool.submit(_hash_stored, name, part, params) for name, part in own.items()}
            adapters = [each for each in conversion.adapters if unit.name in each.targets_by_param]
            for header, tensor in _unit_parts(unit, sources, conversion.formats.get(unit.name), params, adapters):
                output.append(header, tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            wait([hashes[name] for name in own])
        for header, (name, stored) in zip(extra, plan.extra_tensors, strict=True):
            hashes[name] = pool.submit(_hash_stored, name, stored, params)
            for data in read_stored_bytes(name, stored, params.files):
                output.append(header, memoryview(bytes(data)))  # the buffer is used again
        written = output.finish()
        read = {name: done.result() for name, done in hashes.items()}
    progress("", conversion.total_bytes, conversion.total_bytes)
    write_json(draft / RECEIPT, _build_receipt(conversion, read, written))
    plan.write_metadata(draft)


def _build_receipt(conversion: Conversion, read: Mapping[str, str], written: Mapping[str, str]) -> dict[str, Any]:
    used = sorted({format.name for format in conversion.formats.values()})
    return {
        "source": str(conversion.source),
        "formats": used,
        "left_out": list(conversion.left_out),
        "read": dict(read),
        "written": dict(written),
    }


def _hash_stored(name: str, stored: StoredTensor, params: ParamReader) -> str:
    digest = hashlib.sha256()
    for data in read_stored_bytes(name, stored, params.files):
        digest.update(data)
    return digest.hexdigest()


# -- the tensors of a parameter ---------------------------------------------------------------

_Part = tuple[TensorHeader, Tensor]
"""The next rows (or matrix) of a tensor that is written, and its header."""


def _unit_parts(
    unit: SaveUnit,
    sources: Sequence[ParamSource],
    format: WeightFormat | None,
    params: ParamReader,
    adapters: Sequence[LoraAdapters],
) -> Iterator[_Part]:
    dtype = torch.float32 if adapters else unit.dtype
    if format is not None:
        assert not adapters, "adapters are merged into weights that are not quantized"
        yield from _quantized_parts(unit, sources, format, params)
    elif len(unit.shape) == 3 and not _is_convolution(unit):
        for expert in range(unit.shape[0]):
            own = [source for source in sources if source.piece.expert in (None, expert)]
            slab = params.read(own, (1, *unit.shape[1:]), dtype, first=expert)
            slab = _merge_adapters(unit, slab, adapters, ParamPart(experts=(expert, expert + 1)))
            yield from _expert_parts(unit, expert, slab)
    else:
        yield from _row_parts(unit, sources, params, adapters)


def _merge_adapters(unit: SaveUnit, weight: Tensor, adapters: Sequence[LoraAdapters], part: ParamPart) -> Tensor:
    """Return a part of a weight with its adapters, which are added in float32; rounded once."""
    for each in adapters:
        base = weight.clone()
        each.merge(unit.name, weight, base, part)
    return weight.to(unit.dtype)


def _is_convolution(unit: SaveUnit) -> bool:
    return unit.shape[1] == 1


def _expert_parts(unit: SaveUnit, expert: int, slab: Tensor) -> Iterator[_Part]:
    headers = dict(zip(unit.pieces, unit.headers(), strict=True))
    if unit.pieces[0].expert is None:  # all experts in one tensor
        for piece in unit.pieces:
            part = slab if piece.matrix_rows is None else slab[:, slice(*piece.matrix_rows)]
            yield headers[piece], part.transpose(-1, -2) if piece.transposed else part
        return
    for piece in unit.pieces:
        if piece.expert == expert:
            yield headers[piece], slab[0, piece.start : piece.stop]


def _row_parts(
    unit: SaveUnit, sources: Sequence[ParamSource], params: ParamReader, adapters: Sequence[LoraAdapters]
) -> Iterator[_Part]:
    rows = unit.shape[0]
    each = max(1, _CHUNK_BYTES // (4 * prod(unit.shape[1:])))
    if any(source.is_transposed for source in sources):
        each = rows  # their rows are spread over all of the file
    headers = unit.headers()
    for first in range(0, rows, each):
        last = min(first + each, rows)
        dtype = torch.float32 if adapters else unit.dtype
        chunk = params.read(sources, (last - first, *unit.shape[1:]), dtype, first=first)
        if adapters:
            chunk = _merge_adapters(unit, chunk, adapters, ParamPart(rows=torch.arange(first, last)))
        for piece, header in zip(unit.pieces, headers, strict=True):
            low, high = max(piece.start, first), min(piece.stop, last)
            if low < high:
                part = chunk[low - first : high - first]
                yield header, part.transpose(-1, -2) if piece.transposed else part


def _quantized_parts(
    unit: SaveUnit, sources: Sequence[ParamSource], format: WeightFormat, params: ParamReader
) -> Iterator[_Part]:
    segments, columns = weight_segments(unit.pieces), unit.shape[-1]
    if len(unit.shape) == 2 and len(sources) == len(unit.layouts) and not format.global_scale:
        for source, layout, rows in zip(sources, unit.layouts, segments, strict=True):
            (part,) = read_packed_segments([source], None, (rows,), columns, format, params)
            yield from zip(layout.headers(), layout.tensors(part), strict=True)
        return
    experts = [None] if len(unit.shape) == 2 else range(unit.shape[0])
    for expert in experts:
        parts = read_packed_segments(sources, expert, segments, columns, format, params)
        layouts = [layout for layout in unit.layouts if layout.piece.expert in (None, expert)]
        for layout, part in zip(layouts, parts, strict=True):
            yield from zip(layout.headers(), layout.tensors(part), strict=True)


# -- output -----------------------------------------------------------------------------------


class SafetensorsOutput:
    """Safetensors files of known tensors, which are written in runs: each tensor's in order, tensors in any."""

    def __init__(
        self, folder: Path, headers: Sequence[TensorHeader], max_shard_bytes: int, pool: ThreadPoolExecutor
    ) -> None:
        self._folder = folder
        self._pool = pool
        self._hashing: Future[None] | None = None
        self.done_bytes = 0
        self._digests = {header.name: hashlib.sha256() for header in headers}
        self._position: dict[str, int] = {}
        self._file_of: dict[str, str] = {}
        self._descriptors: dict[str, int] = {}
        shards: list[list[TensorHeader]] = [[]]
        used = 0
        for header in headers:
            if shards[-1] and used + header.nbytes > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append(header)
            used += header.nbytes
        for number, shard in enumerate(shards):
            self._create(shard_file_name(WEIGHTS, number, len(shards)), shard)

    def _create(self, file: str, shard: Sequence[TensorHeader]) -> None:
        content = encode_header(shard)
        descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptors[file] = descriptor
        os.pwrite(descriptor, content, 0)
        position = len(content)
        for header in shard:
            self._position[header.name] = position
            self._file_of[header.name] = file
            position += header.nbytes

    def __enter__(self) -> SafetensorsOutput:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def append(self, header: TensorHeader, data: memoryview) -> None:
        """Write the next bytes of a tensor; they are hashed meanwhile, and must not change until the next call."""
        self._wait_for_hash()
        self._hashing = self._pool.submit(self._digests[header.name].update, data)
        descriptor, done = self._descriptors[self._file_of[header.name]], 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], self._position[header.name] + done)
        self._position[header.name] += len(data)
        self.done_bytes += len(data)

    def _wait_for_hash(self) -> None:
        if self._hashing is not None:
            self._hashing.result()

    def finish(self) -> dict[str, str]:
        """Sync all files, write the index, and return the SHA-256 of every tensor."""
        self._wait_for_hash()
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
        if len(self._descriptors) > 1:
            write_json(
                self._folder / INDEX,
                {"metadata": {"total_size": self.done_bytes}, "weight_map": dict(self._file_of)},
            )
        return {name: digest.hexdigest() for name, digest in self._digests.items()}
