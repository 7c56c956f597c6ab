"""What can be known of this machine without loading torch: devices, cores, memory."""

import glob
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_NODES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device a run will take, and how that is known."""

    name: str
    why: str


def choose_device(wanted: str) -> Device:
    """``auto`` settled: an accelerator when the machine has one and this torch was built for it."""
    if wanted != "auto":
        return Device(name=wanted, why="asked for")
    nodes = accelerator_nodes()
    if not nodes:
        return Device(name="cpu", why="this machine shows no accelerator")
    if (build := torch_build()) is None:
        return Device(name="cpu", why=f"there is {nodes[0]}, but this torch is built for the CPU alone")
    return Device(name="cuda", why=f"there is {nodes[0]}, and torch is built for {build}")


def accelerator_nodes() -> list[str]:
    """Device files of accelerators that the environment does not hide."""
    if any(os.environ.get(name, "0") in ("", "-1") for name in _HIDING):
        return []
    return sorted(node for pattern in _NODES for node in glob.glob(pattern))


def accelerator_count() -> int | None:
    """How many accelerators there are, as far as device files tell; None where they do not."""
    if visible := os.environ.get(_HIDING[0]):
        return 0 if visible == "-1" else len(visible.split(","))
    nodes = accelerator_nodes()
    return len(nodes) if all(node.startswith("/dev/nvidia") for node in nodes) else None


def torch_build() -> str | None:
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


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes of main memory that may still be taken, within the container's limit; None where unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else None
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        inside = max(0, limit - used)
        free = inside if free is None else min(free, inside)
    return free


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
