"""Hardware of this machine without torch: accelerators, cores, memory."""

import glob
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
_NAME_FILES = ("/proc/driver/nvidia/gpus/*/information", "/sys/class/drm/card*/device/product_name")
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a run, and why."""

    name: str
    why: str


def choose_device(wanted: str) -> Device:
    """The device of a run; ``auto`` is an accelerator when the machine has one and torch was built for it."""
    if wanted != "auto":
        return Device(name=wanted, why="set by --device")
    nodes = list_accelerators()
    if not nodes:
        return Device(name="cpu", why="this machine shows no accelerator")
    if (build := get_torch_build()) is None:
        return Device(name="cpu", why=f"there is {nodes[0]}, but torch is built for CPU only")
    return Device(name="cuda", why=f"there is {nodes[0]}, and torch is built for {build}")


def list_accelerators() -> list[str]:
    """Device files of accelerators, unless environment variables hide them."""
    if any(os.environ.get(name, "0") in ("", "-1") for name in _VISIBILITY_VARIABLES):
        return []
    return sorted(node for pattern in _DEVICE_FILES for node in glob.glob(pattern))


def count_accelerators() -> int | None:
    """The number of accelerators, from environment and device files; None where unknown."""
    if visible := os.environ.get(_VISIBILITY_VARIABLES[0]):
        return 0 if visible == "-1" else len(visible.split(","))
    nodes = list_accelerators()
    return len(nodes) if all(node.startswith("/dev/nvidia") for node in nodes) else None


def read_accelerator_name() -> str | None:
    """The product name of the first accelerator, as its driver's files have it; None where there are none."""
    for pattern in _NAME_FILES:
        for path in sorted(glob.glob(pattern)):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE) if path.endswith("information") else None
            if name := (found[1] if found else text if path.endswith("product_name") else "").strip():
                return name
    return None


def get_torch_build() -> str | None:
    """What torch was built for, such as "CUDA 13.0" or "ROCm 6.4"; None for CPU builds, or without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    for key, name in (("cuda", "CUDA"), ("hip", "ROCm")):
        if found := re.search(rf"^{key}\b.*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return f"{name} {found[1]}"
    return None


def count_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_free_memory() -> int | None:
    """Bytes of free host memory within the container's limit; None where unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else None
    limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        remaining = max(0, limit - used)
        free = remaining if free is None else min(free, remaining)
    return free


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
