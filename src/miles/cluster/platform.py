"""Platforms: CPU, CUDA and ROCm, and the only module that distinguishes them.

ROCm builds of torch use the ``cuda`` names, so other modules use a ``Platform`` instead of torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from miles.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One device: its kind (``cpu``, ``cuda``, ``rocm``), torch device, product name and memory."""

    kind: str
    device: torch.device
    name: str
    memory_bytes: int

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""
        if self.kind == "cpu":
            return _available_host_memory()
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        """Wait until all work queued on the device is done."""
        if self.kind != "cpu":
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Return cached, unused device memory to the driver."""
        if self.kind != "cpu":
            torch.cuda.empty_cache()


def detect_platform(device_name: str = "auto", *, threads: int | None = None) -> Platform:
    """The device of a run; raises ``UsageError`` for an accelerator that is not there."""
    if threads is not None:
        torch.set_num_threads(threads)
    has_accelerator = torch.cuda.is_available()
    if device_name == "cuda" and not has_accelerator:
        raise UsageError(
            "--device cuda needs a CUDA or ROCm device, but torch sees none; "
            "use --device cpu, or run miles doctor to see what is missing"
        )
    if device_name == "cpu" or not has_accelerator:
        count = torch.get_num_threads()
        return Platform(
            kind="cpu",
            device=torch.device("cpu"),
            name=f"CPU, {count} thread{'s' * (count > 1)}",
            memory_bytes=_host_memory(),
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    kind = "rocm" if torch.version.hip else "cuda"
    return Platform(kind=kind, device=device, name=properties.name, memory_bytes=properties.total_memory)


def consecutive_devices(device: torch.device, count: int) -> list[torch.device]:
    """``count`` devices: this one and those after it; a CPU is repeated."""
    if device.type == "cpu":
        return [device] * count
    first, available = device.index or 0, torch.cuda.device_count()
    if first + count > available:
        raise UsageError(f"{count} devices from {device} on are needed, but torch sees {available}; ask for fewer")
    return [torch.device(device.type, first + i) for i in range(count)]


def parse_device(name: str, flag: str) -> torch.device:
    """The device that ``flag`` names, such as ``cpu`` or ``cuda:1``; raises ``UsageError`` if it is not there."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        raise UsageError(f"{flag} {name} is not available: torch sees {count} accelerators; name one of them.")
    return torch.device("cuda", index)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _available_host_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return _host_memory() // 2
