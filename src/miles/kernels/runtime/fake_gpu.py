"""Ahead-of-time compilation without a GPU: meta tensors that report a GPU, a Triton driver for a target, no launches.

Tensors have a shape, a dtype and strides and no memory, and report ``cuda:0``: code takes every branch that it takes on
the GPU, up to the kernels that it would launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE = torch.device("cuda", 0)
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An architecture: Triton's name, the threads of a warp, and what torch reports of a GPU that has it."""

    family: str
    arch: str
    warp_size: int
    capability: tuple[int, int]
    sms: int
    shared_memory: int
    gpus: str


class FakeDriver:
    """What Triton asks a driver for before it launches."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": target.shared_memory})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        arch = int(self._target.arch) if self._target.family == "cuda" else self._target.arch
        return GPUTarget(self._target.family, arch, self._target.warp_size)


class _FakeEvent:
    """A CUDA event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class _FakeGpuMode(TorchFunctionMode):
    """Tensors that are made on, or moved to, the GPU are meta tensors; they copy nothing to the host.

    Inside of torch, ``in_torch``, they have their own device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_torch = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_replace_device, (args, kwargs))
        if func is Tensor.tolist and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0]
        outside, self.in_torch = self.in_torch, True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_torch = outside


_SHAPES = "torch.fx.experimental.symbolic_shapes"


class _PlainShapes(ModuleType):
    """Torch's functions on symbolic sizes, for sizes that are plain integers: what they are asked is what it is."""

    @staticmethod
    def sym_eq(left: object, right: object) -> bool:
        return left == right

    @staticmethod
    def sym_or(*conditions: object) -> bool:
        return any(conditions)

    @staticmethod
    def sym_and(*conditions: object) -> bool:
        return all(conditions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("is_", "has_", "free_")):  # whether something is symbolic
            return lambda *_, **__: False
        return lambda value=None, *_, **__: value


@contextmanager
def stub_heavy_imports(*, sizes: bool = True) -> Iterator[None]:
    """Keep meta tensors from importing torch.compile and SymPy meanwhile, which would take longer than all else.

    Without ``sizes`` they may import SymPy, for functions that the stub of symbolic sizes lacks.
    """
    dynamo, sympy = ModuleType("torch._dynamo"), ModuleType("sympy")
    dynamo.disable = lambda function, *_, **__: function  # pyright: ignore[reportAttributeAccessIssue]
    sympy.Basic = type("Basic", (), {})  # pyright: ignore[reportAttributeAccessIssue]
    wanted = (dynamo, sympy, _PlainShapes(_SHAPES)) if sizes else (dynamo,)
    stubs = [each for each in wanted if each.__name__ not in sys.modules]
    sys.modules.update({stub.__name__: stub for stub in stubs})
    try:
        yield
    finally:
        for stub in stubs:
            del sys.modules[stub.__name__]


def _replace_device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _META
    return _META if isinstance(value, str) and value.startswith("cuda") else value


@contextmanager
def fake_gpu(target: Target) -> Iterator[None]:
    """Make ``target`` the GPU of this process. Not to be used beside a real one in a process."""
    from triton.runtime import driver

    mode = _FakeGpuMode()

    def is_fake(tensor: Tensor) -> bool:
        return not mode.in_torch and is_meta.__get__(tensor)

    real_device: Any = torch._C.TensorBase.device
    real_is_cuda: Any = torch._C.TensorBase.is_cuda
    is_meta: Any = torch._C.TensorBase.is_meta
    properties = SimpleNamespace(
        multi_processor_count=target.sms,
        shared_memory_per_block_optin=target.shared_memory,
        name=target.gpus,
        total_memory=1 << 37,
        major=target.capability[0],
        minor=target.capability[1],
    )
    replacements: list[tuple[Any, str, Any]] = [
        (torch.version, "hip", "7.0" if target.family == "hip" else None),
        (Tensor, "device", property(lambda self: DEVICE if is_fake(self) else real_device.__get__(self))),
        (Tensor, "is_cuda", property(lambda self: is_fake(self) or real_is_cuda.__get__(self))),
    ]
    cuda: dict[str, Callable[..., Any]] = {
        "get_device_capability": lambda *_: target.capability,
        "get_device_properties": lambda *_: properties,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "Event": _FakeEvent,
        "current_stream": lambda *_: None,
        "synchronize": lambda *_: None,
        "graph_pool_handle": lambda: (0, 0),
        "mem_get_info": lambda *_: (1 << 36, 1 << 37),
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for owner, name, value in (*replacements, *((torch.cuda, name, value) for name, value in cuda.items())):
            stack.enter_context(mock.patch.object(owner, name, value, create=owner is Tensor))
        fake: Any = FakeDriver(target)
        driver.set_active(fake)
        stack.enter_context(mode)
        yield
