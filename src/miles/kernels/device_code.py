"""Whether an operation may run as our own device code here, or as the plain torch it stands beside.

Modules with device code take ``triton``, ``tl`` and ``jit`` from here, so that they can be imported where there is no
compiler; nothing they mark with ``jit`` is called there.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = ["HAVE_TRITON", "jit", "ready", "tl", "triton"]

HAVE_TRITON: bool = find_spec("triton") is not None

if TYPE_CHECKING or HAVE_TRITON:
    import triton
    import triton.language as tl

    jit: Any = triton.jit
else:
    triton = tl = None

    def jit(function: Any) -> Any:
        return function


def ready(x: Tensor) -> bool:
    """Whether ``x`` is on an accelerator, the compiler for it is installed, and nothing will ask for a gradient.

    The engine runs in inference mode and the trainer never does, so both of a trainer's passes use one arithmetic.
    Device code counts in float32, so double precision is left to torch.
    """
    return x.is_cuda and HAVE_TRITON and torch.is_inference_mode_enabled() and x.dtype != torch.float64
