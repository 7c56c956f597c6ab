"""Whether an operation may run as our own device code here, or as the plain torch it stands beside.

Modules with device code take ``triton``, ``tl`` and ``jit`` from here, so that they can be imported where there is no
compiler; nothing they mark with ``jit`` is called there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = [
    "HAVE_TRITON",
    "early",
    "early_in_engines",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "jit_paged",
    "on",
    "processors",
    "ready",
    "tl",
    "trained",
    "triton",
]

HAVE_TRITON: bool = find_spec("triton") is not None

if TYPE_CHECKING or HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit: Any = triton.jit
else:
    triton = tl = gdc_launch_dependents = gdc_wait = None

    def jit(function: Any = None, **how: Any) -> Any:
        return jit if function is None else function


# A kernel that reads pages is compiled once, whatever their number. Shown it, the compiler would make one kernel for a
# table of one column, one for multiples of sixteen and one for all others, each in the middle of the first such step.
jit_paged: Any = jit(do_not_specialize=["pages_stride"])


def ready(x: Tensor) -> bool:
    """Whether ``x`` is on an accelerator, the compiler for it is installed, and nothing will ask for a gradient.

    The engine runs in inference mode and the trainer never does, so both of a trainer's passes use one arithmetic.
    Device code counts in float32, so double precision is left to torch.
    """
    return x.is_cuda and HAVE_TRITON and torch.is_inference_mode_enabled() and x.dtype != torch.float64


@cache
def processors(device: torch.device) -> int:
    """How many processors a card has, each with programs of its own; a few where device code is interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def early(device: torch.device) -> dict[str, bool]:
    """What a launch is given so that its programs may start before the launch before it is over.

    A kernel that is given ``EARLY`` calls ``gdc_launch_dependents`` first, and ``gdc_wait`` before it reads anything
    that a kernel wrote, or writes anything: until then it may fetch weights, and what was there before the last launch
    that was not early, such as where a step's tokens are. One that waits first and calls after that lets the next
    launch read all that was there before itself. Cards that cannot do it, or whose compiler knows another way, start
    kernels in turn.
    """
    able = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def early_in_engines(device: torch.device) -> dict[str, bool]:
    """``early`` of a kernel that trainers launch too: the same code, which in training waits for its turn.

    What it reads before ``gdc_wait`` an optimizer or a gather may just have written there.
    """
    how = early(device)
    return how if torch.is_inference_mode_enabled() else {"EARLY": how["EARLY"]}


def trained(x: Tensor) -> bool:
    """Whether ``x`` is a trainer's, in half precision, where our own device code can run; with a gradient or without.

    The trainer's passes without a gradient must round as those with one. Float32 and wider is left to torch.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and HAVE_TRITON and not torch.is_inference_mode_enabled()


def on(x: Tensor) -> AbstractContextManager[object]:
    """Launches within are on ``x``'s device; a trainer's models may have one each, while one is the process's own."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
