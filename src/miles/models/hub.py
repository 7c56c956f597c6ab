"""Hugging Face checkpoints in and out of a decoder: the front door of ``loading``, ``saving`` and ``fresh``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import UsageError
from miles.models import loading
from miles.models.decoder import Decoder
from miles.models.families import spec_of
from miles.models.files import dtype_of, read_config, stored_tensors
from miles.models.fresh import random
from miles.models.reader import Reader
from miles.models.saving import export, hf_tensors
from miles.models.sources import quantised, sources

__all__ = ["choose_dtype", "export", "hf_tensors", "load", "load_slices", "random", "read_config"]


def choose_dtype(wanted: str, config: Mapping[str, Any], device: torch.device | str) -> torch.dtype:
    """What the ``--dtype`` knob means here: ``auto`` is the config's own on an accelerator, float32 on a CPU."""
    if wanted == "auto":
        wanted = "float32" if torch.device(device).type == "cpu" else dtype_of(config) or "float32"
    known = {str(dtype).removeprefix("torch."): dtype for dtype in loading.DTYPES.values()}
    if wanted not in known:
        raise UsageError(f"dtype {wanted} is not one of float32, bfloat16 and float16: choose one with --dtype.")
    return known[wanted]


def load(folder: Path | str, *, device: torch.device | str, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder a checkpoint folder holds; ``dtype`` None is what ``choose_dtype`` makes of ``auto``.

    Parameters are made one at a time on ``device`` and filled from disk in place: beside them no more than one tensor
    is ever held. Weights in FP8 blocks or MXFP4 are dequantised. Anything missing, unknown, mis-shaped or truncated is
    a CheckpointError, before any weight is read.
    """
    decoder, tensors = _opened(folder, 0, 1, device, dtype)
    decoder.load_state_dict(dict(tensors), assign=True)
    return decoder


def load_slices(
    folder: Path | str,
    *,
    rank: int,
    world: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    reader: Reader | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Our name and rank ``rank``'s rows of every parameter, cut over ``world`` ranks as ``torch.chunk`` cuts.

    That is how FSDP2 shards along the first dimension (``Shard(0)``); the last ranks' rows may be fewer, or none. Only
    the bytes of those rows are read, but for matrices that lie transposed on disk. All ranks get the parameters in one
    order, that of the files. Checks are made at once, as ``load`` makes them. ``reader`` counts what is read, and is
    closed at the end.
    """
    return _opened(folder, rank, world, device, dtype, reader)[1]


def _opened(
    folder: Path | str,
    rank: int,
    world: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
    reader: Reader | None = None,
) -> tuple[Decoder, Iterator[tuple[str, Tensor]]]:
    """A decoder without storage, all checks made, and what its parameters are to be."""
    assert 0 <= rank < world
    config = read_config(folder)
    spec = spec_of(config)
    plan = sources(spec, stored_tensors(folder), quantised(config), Path(folder))
    decoder = Decoder(spec, device="meta", dtype=dtype or choose_dtype("auto", config, device))
    assert not list(decoder.buffers()), "what a checkpoint does not hold is no part of a decoder's state"
    wanted = dict(decoder.named_parameters())
    assert wanted.keys() == plan.keys(), wanted.keys() ^ plan.keys()
    return decoder, loading.slices(plan, wanted, rank=rank, world=world, device=device, reader=reader or Reader())
