"""Hugging Face checkpoints in and out of a decoder, a tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.models import names
from miles.models.decoder import Decoder
from miles.models.families import config_of, spec_of
from miles.models.files import (
    INDEX,
    WEIGHTS,
    Stored,
    copy_companions,
    dtype_of,
    read_config,
    stored_tensors,
    write_json,
    write_whole,
)
from miles.models.spec import DecoderSpec

__all__ = ["choose_dtype", "export", "hf_tensors", "load", "random", "read_config"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def choose_dtype(wanted: str, config: Mapping[str, Any], device: torch.device | str) -> torch.dtype:
    """What the ``--dtype`` knob means here: ``auto`` is the config's own on an accelerator, float32 on a CPU."""
    if wanted == "auto":
        wanted = "float32" if torch.device(device).type == "cpu" else dtype_of(config) or "float32"
    dtype = getattr(torch, wanted, None)
    if dtype not in _CODES:
        raise UsageError(f"dtype {wanted} is not one of float32, bfloat16 and float16: choose one with --dtype.")
    return dtype


# -- in ---------------------------------------------------------------------------------------


def load(folder: Path | str, *, device: torch.device | str, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder a checkpoint folder holds; ``dtype`` None is what ``choose_dtype`` makes of ``auto``.

    Tensors stream from disk one at a time. Anything missing, unknown, mis-shaped or truncated is a CheckpointError.
    """
    config = read_config(folder)
    spec = spec_of(config)
    sources = _sources(spec, stored_tensors(folder), Path(folder))
    decoder = Decoder(spec, device=device, dtype=dtype or choose_dtype("auto", config, device))
    parameters = dict(decoder.named_parameters())
    with torch.no_grad(), ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for hf_name, stored, ours, piece in sources:
            try:
                if stored.file not in opened:
                    opened[stored.file] = stack.enter_context(safe_open(stored.file, framework="pt"))
                tensor: Tensor = opened[stored.file].get_tensor(hf_name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{hf_name} cannot be read from {stored.file} ({error}).") from error
            parameter = parameters[ours]
            (parameter if piece is None else piece.of(parameter)).copy_(tensor)
    return decoder


_Source = tuple[str, Stored, str, names.Piece | None]


def _sources(spec: DecoderSpec, stored: Mapping[str, Stored], folder: Path) -> list[_Source]:
    """Where each piece of each parameter comes from, all checked; ordered as the files are laid out."""
    found: list[_Source] = []
    whole = names.stacked(spec)
    for ours, pieces in names.pieces(spec).items():
        if whole.get(ours) in stored:
            wanted = [(whole[ours], names.shape_of(pieces), None)]
        else:
            wanted = [(piece.hf_name, piece.shape, piece) for piece in pieces]
        for hf_name, shape, piece in wanted:
            if hf_name not in stored:
                raise CheckpointError(f"{hf_name} is missing from {folder}: config.json asks for it, shape {shape}.")
            here = stored[hf_name]
            if here.shape != shape:
                raise CheckpointError(f"{hf_name} in {here.file} has shape {here.shape}, but config.json says {shape}.")
            if here.dtype not in _DTYPES:
                raise CheckpointError(f"{hf_name} in {here.file} is stored as {here.dtype}, not {', '.join(_DTYPES)}.")
            found.append((hf_name, here, ours, piece))
    used = {hf_name for hf_name, *_ in found}
    for hf_name, here in stored.items():
        if hf_name not in used and not names.ignorable(spec, hf_name):
            raise CheckpointError(f"{hf_name} in {here.file} belongs to no part of a {spec.family} decoder.")
    return sorted(found, key=lambda source: (source[1].file, source[1].end))


def random(spec: DecoderSpec, *, seed: int, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """A fresh decoder: matrices normal with deviation 0.02, norms one, biases zero. Same seed and device, same bits."""
    decoder = Decoder(spec, device=device, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder


# -- out --------------------------------------------------------------------------------------


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as Hugging Face names it: detached views of the live parameters."""
    parameters = dict(decoder.named_parameters())
    for ours, pieces in names.pieces(decoder.spec).items():
        tensor = parameters[ours].detach()
        for piece in pieces:
            yield piece.hf_name, piece.of(tensor)


def export(
    decoder: Decoder,
    folder: Path | str,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a folder that transformers loads: weights, ``config.json`` last, and ``like``'s tokenizer files.

    The config is the one given, else ``like``'s, else made from the spec. Each file appears whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = dict(config or (config_of(decoder.spec) if like is None else read_config(like)))
    if replace(spec_of(told), eos_token_ids=()) != replace(decoder.spec, eos_token_ids=()):
        raise CheckpointError(f"The config to be written to {folder} describes another model than the weights.")
    shards = _shards(decoder, max_shard_bytes)
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for file, shard in zip(files, shards, strict=True):
        write_whole(folder / file, lambda out, shard=shard: _write_safetensors(out, shard))
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for _, t in shard)
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    _clear(folder, files)
    if like is not None:
        copy_companions(Path(like), folder)
    told.pop("torch_dtype", None)
    told["dtype"] = str(decoder.head().dtype).removeprefix("torch.")
    write_json(folder / "config.json", told)


def _shards(decoder: Decoder, limit: int) -> list[list[tuple[str, Tensor]]]:
    shards: list[list[tuple[str, Tensor]]] = [[]]
    used = 0
    for name, tensor in hf_tensors(decoder):
        if shards[-1] and used + tensor.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append((name, tensor))
        used += tensor.nbytes
    return shards


def _clear(folder: Path, files: Sequence[str]) -> None:
    """Remove an earlier export's weights, which a reader might take for these."""
    if len(files) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()


def _write_safetensors(out: BinaryIO, tensors: Sequence[tuple[str, Tensor]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in tensors:
        flat = tensor.to("cpu").contiguous().view(-1).view(torch.uint8)
        out.write(flat.numpy().data)
