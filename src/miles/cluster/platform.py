"""Platforms: CPU, CUDA and ROCm, and the only module that distinguishes them.

ROCm builds of torch use the ``cuda`` names, so other modules use a ``Platform`` instead of torch.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from miles.cluster.device_peaks import DevicePeak, find_peak
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

    @property
    def peak(self) -> DevicePeak | None:
        """What its data sheet promises; None for a CPU and for a product that the table lacks."""
        return None if self.kind == "cpu" else find_peak(self.name)

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


def measure_cpu_peak(*, size: int = 512, copied_mib: int = 32, repeats: int = 3) -> DevicePeak:
    """Measure the float32 matmuls and the memory copies of this CPU: the best of a few short attempts."""
    a, b = torch.ones(size, size), torch.ones(size, size)
    source = torch.ones(copied_mib << 18)
    target = torch.empty_like(source)
    matmul = min(_time_call(lambda: torch.mm(a, b)) for _ in range(repeats + 1))
    copy = min(_time_call(lambda: target.copy_(source)) for _ in range(repeats))
    return DevicePeak(flops=2.0 * size**3 / matmul, bandwidth=2.0 * source.nbytes / copy)


def _time_call(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


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


class GpuCounters:
    """Utilisation, memory and power of this machine's GPUs, from NVML or AMD SMI; nothing where neither is there.

    ``why`` says what is missing then.
    """

    def __init__(self) -> None:
        self._nvml: Any
        self._amd: Any
        self._nvml, no_nvml = _import_and_init("pynvml", "nvmlInit", "nvidia-ml-py")
        self._amd, no_amd = (
            (None, "") if self._nvml is not None else _import_and_init("amdsmi", "amdsmi_init", "amdsmi")
        )
        self.why = "" if self.available else f"{no_nvml}, and {no_amd}"

    @property
    def available(self) -> bool:
        """Whether there is anything to read."""
        return self._nvml is not None or self._amd is not None

    def read(self) -> Mapping[str, Mapping[str, float]]:
        """Return the counters of each GPU by name; a counter that a GPU lacks is left out."""
        if self._nvml is not None:
            return {f"GPU {i}": self._read_nvidia(i) for i in range(self._nvml.nvmlDeviceGetCount())}
        if self._amd is not None:
            handles = self._amd.amdsmi_get_processor_handles()
            return {f"GPU {i}": self._read_amd(handle) for i, handle in enumerate(handles)}
        return {}

    def _read_nvidia(self, index: int) -> dict[str, float]:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        readers = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        return _read_all(readers, nvml.NVMLError)

    def _read_amd(self, handle: Any) -> dict[str, float]:
        amd = self._amd
        readers = {
            "utilization": lambda: amd.amdsmi_get_gpu_activity(handle)["gfx_activity"] / 100,
            "memory_gib": lambda: amd.amdsmi_get_gpu_vram_usage(handle)["vram_used"] / 2**10,
            "watts": lambda: float(amd.amdsmi_get_power_info(handle)["average_socket_power"]),
        }
        return _read_all(readers, amd.AmdSmiException)

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        if self._amd is not None:
            self._amd.amdsmi_shut_down()
        self._nvml = self._amd = None


def _import_and_init(name: str, init: str, package: str) -> tuple[Any, str]:
    """The library, started; None and the reason where it is not installed or finds no driver."""
    try:
        library = importlib.import_module(name)
    except ImportError:
        return None, f"{package} is not installed"
    try:
        getattr(library, init)()
    except Exception as error:  # without a driver each library has an error of its own
        return None, f"{package} finds no driver ({type(error).__name__})"
    return library, ""


def _read_all(readers: Mapping[str, Callable[[], float]], error: type[Exception]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, read in readers.items():
        with suppress(error, TypeError, ValueError):  # not every GPU has every counter; AMD SMI gives "N/A"
            values[name] = read()
    return values


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
