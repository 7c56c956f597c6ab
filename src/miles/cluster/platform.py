"""What a device is: the one file that knows CPU, CUDA and ROCm apart.

HIP builds of torch answer to the ``cuda`` names, so code above asks a ``Platform`` and never torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from miles.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One device: its kind (``cpu``, ``cuda``, ``rocm``), torch's name for it, its name on the box, its memory."""

    kind: str
    device: torch.device
    name: str
    memory_bytes: int

    def free_bytes(self) -> int:
        """Memory that could be taken now."""
        if self.kind == "cpu":
            return _available_host_memory()
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        if self.kind != "cpu":
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Return cached, unused device memory to the driver."""
        if self.kind != "cpu":
            torch.cuda.empty_cache()


def find(wanted: str = "auto", *, threads: int | None = None) -> Platform:
    """The device a run will use. Asking for an accelerator that is not there is refused."""
    if threads is not None:
        torch.set_num_threads(threads)
    has_accelerator = torch.cuda.is_available()
    if wanted == "cuda" and not has_accelerator:
        raise UsageError(
            "--device cuda was asked for, but torch sees no CUDA or ROCm device here; "
            "use --device cpu, or run miles doctor to see what is missing"
        )
    if wanted == "cpu" or not has_accelerator:
        return Platform(
            kind="cpu",
            device=torch.device("cpu"),
            name=f"CPU, {torch.get_num_threads()} threads",
            memory_bytes=_host_memory(),
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    kind = "rocm" if torch.version.hip else "cuda"
    return Platform(kind=kind, device=device, name=properties.name, memory_bytes=properties.total_memory)


def several(device: torch.device, count: int) -> list[torch.device]:
    """``count`` devices: this one and those that come after it. A CPU is one, however many share it."""
    if device.type == "cpu":
        return [device] * count
    first, there = device.index or 0, torch.cuda.device_count()
    if first + count > there:
        raise UsageError(f"{count} devices from {device} on were asked for, and torch sees {there}; ask for fewer")
    return [torch.device(device.type, first + i) for i in range(count)]


def device_named(name: str, flag: str) -> torch.device:
    """A device by torch's name, such as ``cpu`` or ``cuda:1``, that ``flag`` asks for; refused where there is none."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None and count else device.index or 0
    if index >= count:
        raise UsageError(f"{flag} {name} was asked for, but torch sees {count} accelerators here; name one of them.")
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
