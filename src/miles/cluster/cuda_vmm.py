"""CUDA virtual memory management: device memory that is released and restored at the same address.

An address range is reserved once, and physical memory is mapped to it and unmapped, so that CUDA graphs captured over
it stay valid. Only for devices whose CUDA driver supports it: elsewhere released memory gets other addresses next time.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import EngineError

# Constants of the CUDA driver API.
_VMM_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _AllocationProps(ctypes.Structure):
    """CUmemAllocationProp; ``flags`` are all off."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class VmmAllocator:
    """Device memory of one owner, which is released and restored as a whole. Restored memory is zeroed."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._blocks: list[weakref.ref[_Block]] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that must not be used between ``release`` and ``restore``."""
        block = _Block(math.prod(shape) * dtype.itemsize, self._device)
        self._blocks.append(weakref.ref(block))
        return block.bytes().view(dtype).view(shape).zero_()

    def release(self) -> None:
        """Wait for the device, and release the memory."""
        torch.cuda.synchronize(self._device)
        for block in self._live_blocks():
            block.unmap()

    def restore(self) -> None:
        """Map the memory again; all of it or, on an error, none."""
        blocks = self._live_blocks()
        try:
            for block in blocks:
                block.map()
        except EngineError:
            for block in blocks:
                block.unmap()
            raise
        for block in blocks:
            block.bytes().zero_()

    def _live_blocks(self) -> list[_Block]:
        return [block for block in (ref() for ref in self._blocks) if block is not None]


def create_vmm_allocator(device: torch.device) -> VmmAllocator | None:
    """An allocator for ``device``; None if its driver does not support virtual memory management."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    supported = ctypes.c_int()
    driver = load_driver()
    known = driver is not None and not driver.cuDeviceGetAttribute(ctypes.byref(supported), _VMM_SUPPORTED, index)
    return VmmAllocator(device) if known and supported.value else None


class _Block:
    """A reserved address range with memory mapped to it; freed with the last tensor over it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._device = device
        location = _Location(_ON_DEVICE, device.index)
        self._props = _AllocationProps(_PINNED, 0, location)
        self._access = _Access(location, _READ_WRITE)
        # The driver calls need torch's CUDA context to be current on this thread.
        torch.cuda.synchronize(device)
        granularity = ctypes.c_size_t()
        address = ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._props), ctypes.c_uint64(0))
        self._mapped_size = ctypes.c_size_t(-(-max(size, 1) // granularity.value) * granularity.value)
        _call(
            "cuMemAddressReserve",
            ctypes.byref(address),
            self._mapped_size,
            granularity,
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._address = address
        self._mapped = [False]
        weakref.finalize(self, _free, device, address, self._mapped_size, self._mapped).atexit = False
        self.map()

    def bytes(self) -> Tensor:
        """A byte tensor over all of it, which keeps the block alive."""
        return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def map(self) -> None:
        """Map physical memory to the address range."""
        if self._mapped[0]:
            return
        handle = self._create()
        try:
            _call("cuMemMap", self._address, self._mapped_size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps it
        self._mapped[0] = True
        _call("cuMemSetAccess", self._address, self._mapped_size, ctypes.byref(self._access), ctypes.c_size_t(1))

    def _create(self) -> ctypes.c_uint64:
        """Allocate physical memory."""
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        for retry in (False, True):
            status = load_driver().cuMemCreate(ctypes.byref(handle), self._mapped_size, ctypes.byref(self._props), zero)
            if status != _OUT_OF_MEMORY:
                break
            if not retry:
                torch.cuda.empty_cache()  # torch may cache unused memory
        if status == _OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise EngineError(
                f"the KV cache needs {self._mapped_size.value / 2**30:.1f} GiB on {self._device}, but "
                f"{free / 2**30:.1f} GiB are free; lower --engine-memory-fraction or --engine-kv-tokens, "
                "or use --offload-train"
            )
        _check("cuMemCreate", status)
        return handle

    def unmap(self) -> None:
        """Release the physical memory; no kernel may be using it."""
        if self._mapped[0]:
            _call("cuMemUnmap", self._address, self._mapped_size)
            self._mapped[0] = False


def _free(device: torch.device, address: ctypes.c_uint64, size: ctypes.c_size_t, mapped: list[bool]) -> None:
    """Free a block after its last tensor is gone; a kernel may still be reading it."""
    torch.cuda.synchronize(device)
    if mapped[0]:
        _call("cuMemUnmap", address, size)
    _call("cuMemAddressFree", address, size)


@cache
def load_driver() -> Any:
    """The CUDA driver library, which torch has loaded; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *args: Any) -> None:
    _check(name, getattr(load_driver(), name)(*args))


def _check(name: str, status: int) -> None:
    if status:
        message = ctypes.c_char_p()
        load_driver().cuGetErrorString(status, ctypes.byref(message))
        why = message.value.decode() if message.value else f"error {status}"
        raise EngineError(f"the CUDA driver call {name} failed: {why}; disable it with --disable-engine-cuda-graph")
