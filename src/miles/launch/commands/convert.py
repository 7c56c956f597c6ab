"""``miles convert``: write a checkpoint in another precision or format, one matrix at a time, with a receipt."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from miles.core.errors import UsageError
from miles.launch.config import ConvertOptions
from miles.launch.hub.resolve import resolve_model
from miles.launch.plan.memory import format_bytes
from miles.models.checkpoint.convert import RECEIPT, Conversion, convert_checkpoint, plan_conversion
from miles.models.checkpoint.safetensors_io import config_dtype, read_config
from miles.models.checkpoint.tensor_sources import is_kv_cache_scale
from miles.models.checkpoint.tiles import DTYPES
from miles.models.checkpoint.torch_dist_folders import RELEASE, find_torch_dist
from miles.precision.formats import FORMATS, WeightFormat, get_format
from miles.schedule.hf_export import DRAFT, list_model_files

_WIDE = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_PROGRESS_LINES = 20
TORCH_DIST = "torch_dist"
"""The format of Megatron's distributed checkpoints."""


def convert(source: Path, target: Path, options: ConvertOptions) -> int:
    """Convert the checkpoint and print what was written."""
    if target.exists():
        raise UsageError(f"{target} exists already; name a folder that does not.")
    saved = find_torch_dist(source)
    if saved is not None or options.format == TORCH_DIST:
        return _convert_torch_dist(source, saved, target, options)
    if options.origin_hf_dir is not None:
        raise UsageError(f"--origin-hf-dir is for a torch_dist checkpoint, which {source} is not; remove it.")
    format, dtype = _read_format(source, options.format)
    if format is None and options.keep:
        raise UsageError("--keep names modules that are not quantized, but --format quantizes nothing; remove --keep.")
    if format is not None and options.adapter:
        raise UsageError(
            f"--adapter merges into weights that are not quantized, but --format is {options.format}; write bfloat16 "
            "first, and convert that."
        )
    adapters = [Path(folder) for folder in options.adapter]
    conversion = plan_conversion(source, format=format, dtype=dtype, keep=options.keep, adapters=adapters)
    _print_plan(conversion, target)
    _write_with_draft(
        source, target, Path(), lambda folder: convert_checkpoint(conversion, folder, progress=_ProgressLines().show)
    )
    print(f"{target} is complete; {RECEIPT} in it lists the digests of all tensors.")
    return 0


def _convert_torch_dist(source: Path, saved: Path | None, target: Path, options: ConvertOptions) -> int:
    """Convert to or from Megatron's distributed format; ``saved`` is the checkpoint in ``source`` that has it."""
    # Imported when chosen: it names another backend.
    from miles.backends.megatron import convert as torch_dist

    if options.keep or options.adapter:
        flag = "--keep" if options.keep else "--adapter"
        raise UsageError(f"{flag} does not work with torch_dist; remove it, or convert in two steps.")
    if saved is None:
        if options.origin_hf_dir is not None:
            raise UsageError(f"--origin-hf-dir is for a torch_dist checkpoint, which {source} is not; remove it.")
        dtype = _WIDE.get(config_dtype(read_config(source)) or "bfloat16", torch.bfloat16)
        plan = torch_dist.plan_to_torch_dist(source, dtype=dtype)
        _print_torch_dist_plan(plan.left_out, source, target, plan.total_bytes)
        _write_with_draft(
            source,
            target,
            Path(RELEASE),
            lambda folder: torch_dist.convert_to_torch_dist(plan, folder, progress=_ProgressLines().show),
        )
    else:
        if options.format not in _WIDE:
            raise UsageError(
                f"{saved} is a torch_dist checkpoint, which can be written as {', '.join(_WIDE)}; name one of them "
                "with --format, and convert the result to other precisions."
            )
        plan = torch_dist.plan_from_torch_dist(
            saved, origin=_find_origin(saved, options.origin_hf_dir), dtype=_WIDE[options.format]
        )
        _print_torch_dist_plan(plan.left_out, saved, target, plan.total_bytes)
        _write_with_draft(
            saved,
            target,
            Path(),
            lambda folder: torch_dist.convert_from_torch_dist(plan, folder, progress=_ProgressLines().show),
        )
    print(f"{target} is complete; {RECEIPT} in it lists the digests of all tensors.")
    return 0


def _write_with_draft(source: Path, target: Path, place: Path, write: Callable[[Path], None]) -> None:
    """Write the target by ``write``, and a copy of the source's draft head to its folder ``place``; all or nothing."""
    if not (source / DRAFT).is_dir():
        write(target)
        return
    partial = target.with_name(f".{target.name}.with-draft")
    if partial.exists():
        shutil.rmtree(partial)  # of a conversion that was killed
    try:
        write(partial)
        files = list_model_files(source / DRAFT)
        (partial / place / DRAFT).mkdir()
        for file in files:
            shutil.copyfile(file, partial / place / DRAFT / file.name)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"  {DRAFT}/: a draft head, {format_bytes(sum(file.stat().st_size for file in files))}, copied as it is")


def _find_origin(saved: Path, origin: str | None) -> Path:
    """The Hugging Face folder whose config and tokenizer a torch_dist checkpoint is written with."""
    if origin is not None:
        return Path(resolve_model(origin))
    if not (saved / "config.json").is_file():
        raise UsageError(
            f"{saved} does not say which model it is; give a Hugging Face folder with its config.json and tokenizer, "
            "--origin-hf-dir MODEL."
        )
    return saved


def _print_torch_dist_plan(left_out: Sequence[str], source: Path, target: Path, size: int) -> None:
    print(f"{source} -> {target}: {format_bytes(size)}")
    state = [name for name in left_out if name.startswith("optimizer.")]
    if state:
        print(f"  left out: the state of the optimizer, {len(state)} tensors")
    rest = [name for name in left_out if name not in set(state)]
    if rest:
        print(f"  left out: {len(rest)} tensors that are not weights of the decoder, such as {rest[0]}")


def _read_format(source: Path, name: str | None) -> tuple[WeightFormat | None, torch.dtype]:
    """The format, None if nothing is to be quantized, and the dtype of what is not quantized."""
    if name is None:
        raise UsageError(f"--format is missing; use one of {', '.join([*_WIDE, *FORMATS, TORCH_DIST])}.")
    if name in _WIDE:
        return None, _WIDE[name]
    if name not in FORMATS:
        raise UsageError(f"--format {name} is not a precision; use one of {', '.join([*_WIDE, *FORMATS, TORCH_DIST])}.")
    return get_format(name), _WIDE.get(config_dtype(read_config(source)) or "bfloat16", torch.bfloat16)


def _print_plan(conversion: Conversion, target: Path) -> None:
    quantized = sum(len(unit.pieces) for unit in conversion.plan.units if unit.layouts)
    wide = sum(len(unit.pieces) for unit in conversion.plan.units if not unit.layouts)
    read = sum(tensor.stop - tensor.start for tensor in conversion.stored.values())
    print(f"{conversion.source}: {len(conversion.stored)} tensors, {format_bytes(read)}")
    for each in conversion.adapters:
        print(f"  merged: an adapter of rank {each.lora.rank} on {len(each.lora.targets)} projections")
    print(f"{target}: {quantized} quantized weights, {wide} others, {format_bytes(conversion.total_bytes)}")
    cache = [name for name in conversion.left_out if is_kv_cache_scale(name)]
    if cache:
        print(f"  left out: {len(cache)} scales of a quantized KV cache, such as {cache[0]}")
    rest = [name for name in conversion.left_out if name not in cache]
    if rest:
        print(f"  left out: {len(rest)} tensors that are not weights of the decoder, such as {rest[0]}")


class _ProgressLines:
    """Prints a line for each twentieth that is done."""

    def __init__(self) -> None:
        self._shown = 0

    def show(self, name: str, done: int, total: int) -> None:
        part = _PROGRESS_LINES * done // max(1, total)
        if part > self._shown:
            self._shown = part
            print(f"  {100 * done // max(1, total):3d}%  {name}", flush=True)
