"""Tiles of stored tensors: the byte ranges that are read together, their target and their conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from miles.models.checkpoint.safetensors_io import ITEM_BYTES, StoredTensor

__all__ = ["DTYPES", "STORED_DTYPES", "ByteRange", "Tile", "has_same_bytes"]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""torch's dtypes by safetensors' names."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of values of a stored tensor."""

    name: str
    stored: StoredTensor
    first: int
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.stored.start + self.first * ITEM_BYTES[self.stored.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.stored.dtype]

    @property
    def dtype(self) -> torch.dtype:
        return STORED_DTYPES[self.stored.dtype]


@dataclass(frozen=True, slots=True)
class Tile:
    """Byte ranges read together, their target, and the conversion; ``convert`` None is a plain dtype conversion."""

    ranges: tuple[ByteRange, ...]
    into: Tensor
    convert: Callable[..., None] | None = None

    @property
    def direct(self) -> bool:
        """Whether the bytes on disk are exactly the bytes wanted in memory."""
        return self.convert is None and has_same_bytes(self.into, self.ranges[0].stored)


def has_same_bytes(view: Tensor, stored: StoredTensor) -> bool:
    """Return whether reading the stored bytes into the memory of ``view`` is all there is to do."""
    return view.device.type == "cpu" and view.dtype == STORED_DTYPES[stored.dtype] and view.is_contiguous()
