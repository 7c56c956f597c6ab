"""Memory that another process of this machine can look into: of a device by CUDA's handles, of the host by a file.

What the other process is told are plain fields (texts and numbers, bytes in base64), never a pickle. A ``Window`` is
its maker's to close; who opened one closes it by letting go of the tensor.
"""

from __future__ import annotations

import base64
import binascii
import mmap
import os
import re
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import SyncError

_ROOM = Path("/dev/shm")
_NAME = re.compile(r"miles-[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BYTES = ("handle", "counter", "event")


def whereabouts(device: torch.device) -> dict[str, str]:
    """The machine as its kernel calls it since it started, and the device by its serial number."""
    return dict(_whereabouts(device))


@cache
def _whereabouts(device: torch.device) -> Mapping[str, str]:
    machine = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    if device.type == "cpu":
        return {"machine": machine, "device": "cpu"}
    return {"machine": machine, "device": str(torch.cuda.get_device_properties(device).uuid)}


def why_apart(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Why one cannot look into memory of the other; None where it can."""
    if not ours["machine"] or ours["machine"] != theirs.get("machine"):
        return "is on another machine"
    if ours["device"] != theirs.get("device"):
        return f"is on device {theirs.get('device')}, and the weights are on {ours['device']}"
    if ours["device"] == "cpu" and not _ROOM.is_dir():
        return f"shares no memory on a machine that has no {_ROOM}"
    return None


class Window:
    """``memory`` of ``size`` bytes on ``device``."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory: Tensor
        self._device = device
        self._file: Path | None = None
        if device.type == "cpu":
            self._file = _ROOM / f"miles-{secrets.token_hex(16)}"
            self.memory = _mapped(self._file, size, make=True)
        else:
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def told(self) -> dict[str, Any]:
        """What one other process is told to look into it; each is told anew, because torch counts who has it."""
        here = whereabouts(self._device)
        if self._file is not None:
            return {"kind": "file", "name": self._file.name, "size": self.memory.numel(), **here}
        return {**_shared(self.memory), **here}

    def close(self) -> None:
        """Free it; on a device its memory is free when the last who opened it has let go."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        else:
            torch.cuda.ipc_collect()


def shown(tensor: Tensor) -> dict[str, Any] | None:
    """What one other process is told to look into the memory ``tensor`` lies in; None where no other can.

    That of a device, which stays taken, once told, until the other has let go of it.
    """
    return {**_shared(tensor), **whereabouts(tensor.device)} if tensor.is_cuda else None


def opened(told: Mapping[str, Any], device: torch.device) -> Tensor:
    """The bytes of another process's window; refuses (SyncError) one that is not of this machine and device."""
    theirs = {name: str(told.get(name, "")) for name in ("machine", "device")}
    apart = why_apart(theirs, whereabouts(device))
    if apart is not None:
        raise SyncError(f"This server {apart}; send the weights in requests (tensor) instead.")
    size = _number(told, "size")
    if told.get("kind") == "file":
        name = str(told.get("name", ""))
        if not _NAME.fullmatch(name) or not (_ROOM / name).is_file():
            raise SyncError(f"This server does not see the memory {name[:60]!r} in {_ROOM}; is it in a container?")
        if (_ROOM / name).stat().st_size < size:
            raise SyncError(f"The memory {name!r} has fewer bytes than the {size} announced.")
        return _mapped(_ROOM / name, size, make=False)
    return _taken(told, size, device)


def release() -> None:
    """Give back, after the tensors of opened windows were let go, what torch keeps of them."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _mapped(path: Path, size: int, *, make: bool) -> Tensor:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0)
    at = os.open(path, flags, 0o600)
    try:
        if make:
            os.posix_fallocate(at, 0, max(size, 1))
        return torch.frombuffer(mmap.mmap(at, max(size, 1)), dtype=torch.uint8)[:size]
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SyncError(f"{_ROOM} cannot hold {size} bytes of weights: {error.strerror}; make it larger.") from error
    finally:
        os.close(at)


def _shared(memory: Tensor) -> dict[str, Any]:
    try:
        # The order is that of torch.multiprocessing.reductions, which pickles the same fields.
        _, handle, size, offset, counter, counter_at, event, wait = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        said = (str(error).splitlines() or [""])[0].rstrip(".")
        raise SyncError(
            f"CUDA does not show this process's memory to another: {said}; leave expandable_segments out of "
            "PYTORCH_CUDA_ALLOC_CONF, or send the weights in requests (--update-weight-transport tensor)."
        ) from error
    words = {
        name: base64.b64encode(value).decode("ascii")
        for name, value in zip(_BYTES, (handle, counter, event), strict=True)
    }
    return {"kind": "cuda", **words, "size": size, "offset": offset, "counter_at": counter_at, "wait": bool(wait)}


def _taken(told: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        raise SyncError(
            "This server is on a CPU, which sees no memory of a GPU; send the weights in requests (tensor)."
        )
    try:
        handle, counter, event = (base64.b64decode(str(told.get(name, "")), validate=True) for name in _BYTES)
        numbers = (size, _number(told, "offset"), counter, _number(told, "counter_at"), event, bool(told.get("wait")))
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, handle, *numbers)
    except (RuntimeError, ValueError, binascii.Error) as error:
        said = (str(error).splitlines() or [""])[0].rstrip(".")
        raise SyncError(f"This server cannot open the sender's memory: {said}.") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]


def _number(told: Mapping[str, Any], name: str) -> int:
    value = told.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 50:
        raise SyncError(f"The {name} of the sender's memory is {value!r}, and must be a whole number.")
    return value
