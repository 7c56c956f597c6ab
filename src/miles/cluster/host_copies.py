"""Host copies of device tensors in page-locked memory, which is kept from one offload to the next.

    to the host      queue all copies, wait for them, release the memory on the device
    to the device    queue all copies, wait for them; the host memory stays for the next time

Page-locked memory is copied at the speed of the link; the driver copies any other through a buffer of its own. Torch's
allocator of such memory rounds each allocation up to a power of two, so ordinary memory of the exact size is registered
with the CUDA driver. Where there is no such driver, or it refuses, copies are slower and otherwise the same.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles.cluster.cuda_vmm import load_driver

_PAGE = 4096
# Tensors of a block begin at multiples of this.
_ALIGNMENT = 512
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts


class HostCopies:
    """Moves tensors, each under a name, between a device and the host.

    The host memory of a name is used again by the next tensor of as many bytes under that name, and freed with the last
    of them when the HostCopies are gone. So a tensor that was moved to the host must not be read any more once another
    has been moved there under its name.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    @property
    def bytes(self) -> int:
        """Bytes of host memory that are kept."""
        return sum(len(place.bytes) for place in self._places.values())

    def move(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Move the data of ``tensors`` to ``device``; the tensors stay the same objects."""
        moved = self.copy({name: t for name, t in tensors.items() if not _is_on(t, device)}, device)
        for name, copy in moved.items():
            tensors[name].data = copy

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return copies of ``tensors`` on ``device``, each with its own storage, when all have been made."""
        if device.type == "cpu":
            copies = self._allocate(tensors)
        else:
            copies = {name: torch.empty_like(t, device=device, requires_grad=False) for name, t in tensors.items()}
        for name, copy in copies.items():
            copy.copy_(tensors[name], non_blocking=True)
        for used in {t.device for t in (*tensors.values(), *copies.values())}:
            if used.type == "cuda":
                torch.cuda.current_stream(used).synchronize()
        return copies

    def _allocate(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a host tensor like each of ``tensors``; new ones are in one block."""
        missing = {
            name: t
            for name, t in tensors.items()
            if name not in self._places or len(self._places[name].bytes) != t.nbytes
        }
        if missing:
            starts = [0]
            for tensor in missing.values():
                starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
            block = _HostBlock(starts[-1], next((t.device for t in missing.values() if t.is_cuda), None))
            for (name, tensor), start in zip(missing.items(), starts, strict=False):
                self._places[name] = _Place(block=block, bytes=block.bytes[start : start + tensor.nbytes])
        return {name: _view_as(self._places[name].bytes, tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The host memory of a name, which is part of a block."""

    block: _HostBlock
    bytes: np.ndarray


class _HostBlock:
    """Ordinary host memory, page-locked for ``device`` where that is possible, until nothing holds the block.

    Tensors over its memory may outlive it: they keep the memory, which is then no longer page-locked.
    """

    def __init__(self, size: int, device: torch.device | None) -> None:
        pages = -(-size // _PAGE)
        memory = np.empty((pages + 1) * _PAGE, np.uint8)
        start = -memory.ctypes.data % _PAGE
        self.bytes = memory[start : start + pages * _PAGE]
        if device is not None and pages and _lock_pages(self.bytes, device):
            weakref.finalize(self, _unlock_pages, self.bytes, device).atexit = False


def _view_as(memory: np.ndarray, tensor: Tensor) -> Tensor:
    """Return a tensor over ``memory``, with a storage of exactly that size, that is like ``tensor``."""
    like = torch.empty_like(tensor, device="meta")
    return torch.from_numpy(memory).view(tensor.dtype).as_strided(like.shape, like.stride())


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _lock_pages(memory: np.ndarray, device: torch.device) -> bool:
    """Page-lock ``memory``; false if it remains ordinary memory."""
    driver = None if torch.version.hip is not None else load_driver()
    if driver is None:
        return False
    torch.from_numpy(memory)[::_PAGE] = 0  # has the pages allocated by all threads; the driver has but one
    torch.cuda.synchronize(device)  # the driver call needs torch's context to be current on this thread
    status = driver.cuMemHostRegister_v2(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(_PORTABLE)
    )
    return status == 0


def _unlock_pages(memory: np.ndarray, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may be under way; and as above
    load_driver().cuMemHostUnregister(ctypes.c_void_p(memory.ctypes.data))
