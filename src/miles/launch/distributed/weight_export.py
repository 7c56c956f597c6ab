"""Weight export of trainer ranks in other processes: tensors in shared memory, or in a message from another node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.core.types import Array
from miles.sync.shared_memory import SharedBuffer, open_handle

# Where a tensor may begin: at a multiple that suits every dtype.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightExportEntry:
    """A tensor in the exported bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightExport:
    """Tensors of another process: the ``handle`` of the memory they are in, or the bytes themselves as ``data``."""

    tensors: tuple[WeightExportEntry, ...]
    handle: Mapping[str, Any]
    data: Array | None = None


class WeightExporter:
    """Exports tensors to the leader, in memory that is shared until ``release`` if ``shares_memory``."""

    def __init__(self, device: torch.device, *, shares_memory: bool) -> None:
        self._device = device
        self._shares_memory = shares_memory
        self._buffer: SharedBuffer | None = None

    def export(self, tensors: Mapping[str, Tensor]) -> WeightExport:
        """Copy the tensors into shared memory, or onto the host."""
        rows: list[WeightExportEntry] = []
        size = 0
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows.append(WeightExportEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=size))
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.release()
        if self._shares_memory:
            self._buffer = SharedBuffer(size, self._device)
            _fill(self._buffer.memory, rows, tensors)
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device)  # the other process reads on a stream of its own
            return WeightExport(tensors=tuple(rows), handle=self._buffer.export_handle())
        memory = torch.empty(size, dtype=torch.uint8)
        _fill(memory, rows, tensors)
        return WeightExport(tensors=tuple(rows), handle={}, data=memory.numpy())

    def release(self) -> None:
        """Free the shared memory, which the leader has copied."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def import_weights(export: WeightExport, device: torch.device) -> dict[str, Tensor]:
    """Copy exported tensors to ``device``, into new ones that the caller may keep."""
    memory = open_handle(export.handle, device) if export.data is None else torch.from_numpy(np.asarray(export.data))
    found: dict[str, Tensor] = {}
    for row in export.tensors:
        dtype = getattr(torch, row.dtype)
        count = dtype.itemsize
        for dim in row.shape:
            count *= dim
        # A copy of the bytes first: what begins at any byte of a mapping may not be viewed as another dtype.
        found[row.name] = memory[row.offset : row.offset + count].clone().view(dtype).view(row.shape).to(device)
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return found


def _fill(memory: Tensor, rows: list[WeightExportEntry], tensors: Mapping[str, Tensor]) -> None:
    for row in rows:
        data = tensors[row.name].detach().contiguous().view(-1).view(torch.uint8)
        memory[row.offset : row.offset + data.numel()].copy_(data)
