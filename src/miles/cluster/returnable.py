"""Device memory that is given back and taken again without moving, so that what was recorded over it stays true.

An address is reserved once; memory is put behind it and taken away. Only CUDA's driver is asked for it, and only where
it says that it can: elsewhere there is none of this, and whoever gives memory back gets other addresses next time.
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

# Numbers of the driver's interface.
_CAN_MANAGE = 102  # the attribute of a device that can do all this
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _Wanted(ctypes.Structure):
    """What kind of memory; ``flags`` are all off."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Returnable:
    """The memory of one owner on one device, all of which is there or none. What comes back is zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._blocks: list[weakref.ref[_Block]] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that must not be touched between ``give_back`` and ``take``."""
        block = _Block(math.prod(shape) * dtype.itemsize, self._device)
        self._blocks.append(weakref.ref(block))
        return block.bytes().view(dtype).view(shape).zero_()

    def give_back(self) -> None:
        """Wait for the device, and let go of the memory."""
        torch.cuda.synchronize(self._device)
        for block in self._there():
            block.unmap()

    def take(self) -> None:
        """Have it again, or nothing of it where it does not fit any more."""
        blocks = self._there()
        try:
            for block in blocks:
                block.map()
        except EngineError:
            for block in blocks:
                block.unmap()
            raise
        for block in blocks:
            block.bytes().zero_()

    def _there(self) -> list[_Block]:
        return [block for block in (ref() for ref in self._blocks) if block is not None]


def returnable(device: torch.device) -> Returnable | None:
    """Such memory on ``device``, if it can be had there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    index, able = torch.cuda.current_device() if device.index is None else device.index, ctypes.c_int()
    driver = _driver()
    asked = driver is not None and not driver.cuDeviceGetAttribute(ctypes.byref(able), _CAN_MANAGE, index)
    return Returnable(device) if asked and able.value else None


class _Block:
    """An address, and memory behind it from the start. Tensors over it keep it; it goes when they do."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        location = _Location(_ON_DEVICE, device.index)
        self._wanted = _Wanted(_PINNED, 0, location)
        self._access = _Access(location, _READ_WRITE)
        # Nothing is asked of the driver by a thread on which torch has not yet said which device is meant.
        torch.cuda.synchronize(device)
        grain, address = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._wanted), ctypes.c_uint64(0))
        self._room = ctypes.c_size_t(-(-max(size, 1) // grain.value) * grain.value)
        _call("cuMemAddressReserve", ctypes.byref(address), self._room, grain, ctypes.c_uint64(0), ctypes.c_uint64(0))
        self._address, self._mapped = address, [False]
        weakref.finalize(self, _end, device, address, self._room, self._mapped).atexit = False
        self.map()

    def bytes(self) -> Tensor:
        """All of it; the tensor keeps the block."""
        return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def map(self) -> None:
        """Put memory behind the address."""
        if self._mapped[0]:
            return
        handle = self._create()
        try:
            _call("cuMemMap", self._address, self._room, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # what is mapped keeps it
        self._mapped[0] = True
        _call("cuMemSetAccess", self._address, self._room, ctypes.byref(self._access), ctypes.c_size_t(1))

    def _create(self) -> ctypes.c_uint64:
        """Memory that lies nowhere yet."""
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        for again in (False, True):
            failed = _driver().cuMemCreate(ctypes.byref(handle), self._room, ctypes.byref(self._wanted), zero)
            if failed != _OUT_OF_MEMORY:
                break
            if not again:
                torch.cuda.empty_cache()  # torch may hold what nobody uses
        if failed == _OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise EngineError(
                f"the engine's cache takes {self._room.value / 2**30:.1f} GiB of {self._device} at once, where "
                f"{free / 2**30:.1f} GiB are free; lower --engine-memory-fraction or --engine-kv-tokens"
            )
        _check("cuMemCreate", failed)
        return handle

    def unmap(self) -> None:
        """Let the memory behind the address go; nobody may be using it."""
        if self._mapped[0]:
            _call("cuMemUnmap", self._address, self._room)
            self._mapped[0] = False


def _end(device: torch.device, address: ctypes.c_uint64, room: ctypes.c_size_t, mapped: list[bool]) -> None:
    """When the last tensor over a block is gone, which may be while a kernel still reads it."""
    torch.cuda.synchronize(device)
    if mapped[0]:
        _call("cuMemUnmap", address, room)
    _call("cuMemAddressFree", address, room)


@cache
def _driver() -> Any:
    """CUDA's driver, which torch has loaded; ``None`` where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *given: Any) -> None:
    _check(name, getattr(_driver(), name)(*given))


def _check(name: str, failed: int) -> None:
    if failed:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(failed, ctypes.byref(said))
        why = said.value.decode() if said.value else f"error {failed}"
        raise EngineError(f"CUDA's driver refused {name}: {why}; --disable-engine-graphs does without it")
