"""Memory shared with another process of this machine: CUDA IPC handles for GPU memory, /dev/shm files for host memory.

A handle consists of plain fields (strings and numbers, bytes in base64), never a pickle. The creator closes a
``SharedBuffer``; a process that opened one closes it by dropping the tensor.
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

_SHM = Path("/dev/shm")
_NAME = re.compile(r"miles-[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BYTES = ("handle", "counter", "event")


def describe_location(device: torch.device) -> dict[str, str]:
    """Return the machine's boot id and the device's UUID."""
    return dict(_describe_location(device))


@cache
def _describe_location(device: torch.device) -> Mapping[str, str]:
    machine = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
    if device.type == "cpu":
        return {"machine": machine, "device": "cpu"}
    return {"machine": machine, "device": str(torch.cuda.get_device_properties(device).uuid)}


def explain_unreachable(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return why two processes cannot share memory; None if they can."""
    if not ours["machine"] or ours["machine"] != theirs.get("machine"):
        return "is on another machine"
    if ours["device"] != theirs.get("device"):
        return f"is on device {theirs.get('device')}, but the weights are on {ours['device']}"
    if ours["device"] == "cpu" and not _SHM.is_dir():
        return f"cannot share memory on a machine without {_SHM}"
    return None


class SharedBuffer:
    """Shared ``memory`` of ``size`` bytes on ``device``."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory: Tensor
        self._device = device
        self._file: Path | None = None
        if device.type == "cpu":
            self._file = _SHM / f"miles-{secrets.token_hex(16)}"
            self.memory = _map_file(self._file, size, create=True)
        else:
            self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def export_handle(self) -> dict[str, Any]:
        """Return a handle for one other process; each needs a new one, because torch counts references."""
        location = describe_location(self._device)
        if self._file is not None:
            return {"kind": "file", "name": self._file.name, "size": self.memory.numel(), **location}
        return {**_export_cuda(self.memory), **location}

    def close(self) -> None:
        """Free it; GPU memory is free when the last process that opened it has dropped it."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        else:
            torch.cuda.ipc_collect()


def export_handle(tensor: Tensor) -> dict[str, Any] | None:
    """Return a handle of the GPU memory of ``tensor`` for one other process; None for host memory.

    Once exported, the memory stays allocated until the other process drops it.
    """
    return {**_export_cuda(tensor), **describe_location(tensor.device)} if tensor.is_cuda else None


def open_handle(handle: Mapping[str, Any], device: torch.device) -> Tensor:
    """Map another process's memory; SyncError if it is not on this machine and device."""
    theirs = {name: str(handle.get(name, "")) for name in ("machine", "device")}
    problem = explain_unreachable(theirs, describe_location(device))
    if problem is not None:
        raise SyncError(f"This server {problem}; send the weights in requests (tensor) instead.")
    size = _parse_number(handle, "size")
    if handle.get("kind") == "file":
        name = str(handle.get("name", ""))
        if not _NAME.fullmatch(name) or not (_SHM / name).is_file():
            raise SyncError(
                f"This server does not see the shared memory {name[:60]!r} in {_SHM}; share {_SHM} with its container."
            )
        if (_SHM / name).stat().st_size < size:
            raise SyncError(f"The shared memory {name!r} has fewer bytes than the announced {size}.")
        return _map_file(_SHM / name, size, create=False)
    return _open_cuda(handle, size, device)


def release_ipc() -> None:
    """Release torch's IPC bookkeeping after the tensors of opened handles were dropped."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _map_file(path: Path, size: int, *, create: bool) -> Tensor:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        if create:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        return torch.frombuffer(mmap.mmap(descriptor, max(size, 1)), dtype=torch.uint8)[:size]
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SyncError(f"{_SHM} cannot hold {size} bytes of weights: {error.strerror}; make it larger.") from error
    finally:
        os.close(descriptor)


def _export_cuda(memory: Tensor) -> dict[str, Any]:
    try:
        # The order is that of torch.multiprocessing.reductions, which pickles the same fields.
        _, handle, size, offset, counter, counter_at, event, wait = memory.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise SyncError(
            f"CUDA IPC cannot export this process's memory: {reason}; leave expandable_segments out of "
            "PYTORCH_CUDA_ALLOC_CONF, or send the weights in requests (--update-weight-transport tensor)."
        ) from error
    encoded = {
        name: base64.b64encode(value).decode("ascii")
        for name, value in zip(_BYTES, (handle, counter, event), strict=True)
    }
    return {"kind": "cuda", **encoded, "size": size, "offset": offset, "counter_at": counter_at, "wait": bool(wait)}


def _open_cuda(handle: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        raise SyncError("This server is on a CPU and cannot map GPU memory; send the weights in requests (tensor).")
    try:
        ipc_handle, counter, event = (base64.b64decode(str(handle.get(name, "")), validate=True) for name in _BYTES)
        offset, counter_offset = _parse_number(handle, "offset"), _parse_number(handle, "counter_at")
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index or 0, ipc_handle, size, offset, counter, counter_offset, event, bool(handle.get("wait"))
        )
    except (RuntimeError, ValueError, binascii.Error) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise SyncError(f"This server cannot open the sender's memory: {reason}.") from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]


def _parse_number(handle: Mapping[str, Any], name: str) -> int:
    value = handle.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 50:
        raise SyncError(f"The {name} of the sender's memory is {value!r}, but must be an integer.")
    return value
