"""Triton availability, dispatch predicates, and programmatic dependent launch (PDL).

Modules with Triton kernels take ``triton``, ``tl`` and ``jit`` from here, so that they can be imported where Triton is
not installed; nothing decorated with ``jit`` is called there.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = [
    "HAVE_TRITON",
    "constexpr_function",
    "count_sms",
    "device_guard",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "jit_paged",
    "pdl_options",
    "pdl_options_inference",
    "register_limit",
    "start_hashing_triton",
    "tl",
    "triton",
    "use_triton",
    "use_triton_inference",
    "use_triton_training",
    "watch_compilation",
]

HAVE_TRITON: bool = find_spec("triton") is not None

if TYPE_CHECKING or HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    jit: Any = triton.jit
    constexpr_function: Any = triton.constexpr_function
else:
    triton = tl = gdc_launch_dependents = gdc_wait = None

    def jit(function: Any = None, **options: Any) -> Any:
        return jit if function is None else function

    def constexpr_function(function: Any) -> Any:
        return function


# Do not specialize on the stride of the block table: Triton would compile one kernel for a stride of 1, one for
# multiples of 16 and one for all others, each in the middle of the first such step.
jit_paged: Any = jit(do_not_specialize=["block_table_stride"])


def use_triton(x: Tensor) -> bool:
    """Whether the batch-invariant Triton kernels apply: any GPU tensor but float64, in training and inference."""
    return x.is_cuda and HAVE_TRITON and x.dtype != torch.float64


def use_triton_inference(x: Tensor) -> bool:
    """Whether the Triton kernels for inference apply: ``x`` is on a GPU, Triton is installed, and inference mode is on.

    The engine runs in inference mode and the trainer never does, so both of a trainer's passes use the same kernels.
    Kernels accumulate in float32, so float64 is left to torch.
    """
    return use_triton(x) and torch.is_inference_mode_enabled()


@cache
def count_sms(device: torch.device) -> int:
    """The number of SMs of a GPU; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options for programmatic dependent launch (PDL): a kernel may start before the previous one is over.

    A kernel that gets ``PDL`` calls ``gdc_launch_dependents`` first, and ``gdc_wait`` before it reads anything that a
    kernel wrote, or writes anything: until then it may load weights, and what was written before the last launch
    without PDL, such as the block table of a step. One that waits first and then calls ``gdc_launch_dependents`` lets
    the next launch read all that was there before itself. On GPUs or compilers without PDL, kernels start in turn.
    """
    supported = (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"PDL": True, "launch_pdl": True} if supported else {"PDL": False}


def pdl_options_inference(device: torch.device) -> dict[str, bool]:
    """``pdl_options`` of a kernel that trainers launch too: the same code, which in training starts in turn.

    What it reads before ``gdc_wait`` may just have been written by an optimizer or an all-gather.
    """
    options = pdl_options(device)
    return options if torch.is_inference_mode_enabled() else {"PDL": options["PDL"]}


def register_limit(registers: int | None) -> dict[str, int]:
    """Launch option that limits the registers of a thread; the compiler for AMD GPUs has none."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}


def use_triton_training(x: Tensor) -> bool:
    """Whether the Triton kernels for training apply: half precision on a GPU, outside inference mode.

    A trainer's passes without a gradient must round like those with one. Float32 and wider is left to torch.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and half and HAVE_TRITON and not torch.is_inference_mode_enabled()


def device_guard(x: Tensor) -> AbstractContextManager[object]:
    """Make ``x``'s device current for kernel launches; models of a trainer may be on several devices."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def start_hashing_triton() -> threading.Thread:
    """Hash Triton's own files in a thread; the first kernel would wait for the hash, a part of every cache key."""

    def hash_files() -> None:
        with suppress(ImportError, OSError):  # where there is no Triton, or another one
            from triton.runtime.cache import triton_key

            triton_key()

    thread = threading.Thread(target=hash_files, daemon=True)
    thread.start()
    return thread


def watch_compilation(add: Callable[[str, float], None]) -> None:
    """Have ``add`` called with a name and a value for every kernel that Triton compiles, or finds in its cache.

    ``compile/KERNEL`` are seconds, ``kernels_compiled`` and ``kernels_cached`` are counts.
    """
    if not HAVE_TRITON:
        return

    def listen(*, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            add("kernels_cached", 1)
            return
        add("kernels_compiled", 1)
        add("kernel_seconds", times.total / 1e6)
        add(f"compile/{metadata['name']}", times.total / 1e6)

    knobs: Any = importlib.import_module("triton.knobs")
    knobs.compilation.listener = listen
