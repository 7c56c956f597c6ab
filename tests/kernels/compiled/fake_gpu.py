"""A GPU that is not there, for ahead-of-time compilation: torch and Triton report its properties, and no kernel runs.

Tensors are on the meta device and report ``cuda:0``: they have a shape, a dtype and strides and no memory. So launchers
take every branch that they take on the GPU, and Triton compiles what they launch.
"""

from __future__ import annotations

import io
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from miles.kernels.runtime.fake_gpu import DEVICE, FakeDriver, Target

# Shared memory is the most that one program may have (LDS of a compute unit on AMD GPUs).
TARGETS = {
    "sm_80": Target(
        family="cuda", arch="80", warp_size=32, capability=(8, 0), sms=108, shared_memory=163 << 10, gpus="A100"
    ),
    "sm_90": Target(
        family="cuda", arch="90", warp_size=32, capability=(9, 0), sms=132, shared_memory=227 << 10, gpus="H100, H200"
    ),
    "sm_100": Target(
        family="cuda",
        arch="100",
        warp_size=32,
        capability=(10, 0),
        sms=148,
        shared_memory=227 << 10,
        gpus="B200, GB200",
    ),
    "gfx942": Target(
        family="hip", arch="gfx942", warp_size=64, capability=(9, 4), sms=304, shared_memory=64 << 10, gpus="MI300X"
    ),
    "gfx950": Target(
        family="hip", arch="gfx950", warp_size=64, capability=(9, 5), sms=256, shared_memory=160 << 10, gpus="MI355X"
    ),
}


class NotUsed(Exception):
    """The GPU does not use the kernel: its launchers take another path there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A kernel compiled for a case: registers of a thread, bytes it spills, bytes of shared memory of a program."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int


class GpuTensor(Tensor):
    """A meta tensor that reports the GPU as its device."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


class GpuTensorMode(TorchFunctionMode):
    """Tensors that are made on, or moved to, the GPU are ``GpuTensor``s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_unwrap, (args, kwargs or {}))
        kwargs.pop("pin_memory", None)
        return pytree.tree_map(_wrap, func(*args, **kwargs))


def _unwrap(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.as_subclass(Tensor)
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def _wrap(value: Any) -> Any:
    is_meta = type(value) is Tensor and value.is_meta
    return value.as_subclass(GpuTensor) if is_meta else value


@contextmanager
def fake_gpu(target: Target, compiled: list[Compiled]) -> Iterator[None]:
    """Make ``target`` the GPU of this process; what is launched is compiled and appended."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launch: Any = JITFunction.run
    seen: set[int] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            name = f"{self.fn.__module__.removeprefix('miles.kernels.')}.{self.fn.__name__}"
            compiled.append(_measure(name, kernel, log.getvalue()))
        return kernel

    properties = SimpleNamespace(
        multi_processor_count=target.sms, shared_memory_per_block_optin=target.shared_memory, name=target.gpus
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(mock.patch.object(knobs.nvidia, "dump_ptxas_log", True))
        stack.enter_context(mock.patch.object(torch.version, "hip", "7.0" if target.family == "hip" else None))
        for name, value in (
            ("get_device_capability", lambda *_: target.capability),
            ("get_device_properties", lambda *_: properties),
            ("current_device", lambda: 0),
            ("device", lambda *_: nullcontext()),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        driver.set_active(FakeDriver(target))
        stack.enter_context(GpuTensorMode())
        yield


def _measure(name: str, kernel: Any, log: str) -> Compiled:
    """Registers and spills: of ptxas' report, or of the metadata in the AMD assembly."""
    if "ptx" in kernel.asm:
        registers = int(_find(r"Used (\d+) registers", log))
        spilled = sum(int(_find(rf"(\d+) bytes spill {kind}", log)) for kind in ("stores", "loads"))
    else:
        text = kernel.asm["amdgcn"]
        # The compiler counts spilled registers of 4 bytes, the vector ones for each thread.
        registers = int(_find(r"\.vgpr_count:\s*(\d+)", text))
        spilled = 4 * int(_find(r"\.vgpr_spill_count:\s*(\d+)", text))
    metadata = kernel.metadata
    return Compiled(
        kernel=name,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        warps=metadata.num_warps,
    )


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not in: {text[-2000:]}"
    return found[1]


def run_program(cases: dict[str, Callable[[], None]], arguments: list[str]) -> None:
    """Compile the named cases (none: all) for a target; prints a line of JSON for each case."""
    target, *names = arguments
    compiled: list[Compiled] = []
    with fake_gpu(TARGETS[target], compiled):
        for name in names or cases:
            compiled.clear()
            error = not_used = None
            try:
                cases[name]()
            except NotUsed as raised:
                not_used = str(raised)
            except Exception as raised:  # any failure of a case is reported, and the others are compiled
                traceback.print_exc()
                error = f"{type(raised).__name__}: {raised}"
            line = {
                "case": name,
                "error": error,
                "not_used": not_used,
                "compiled": [asdict(found) for found in compiled],
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
