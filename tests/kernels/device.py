"""Where device code is tested: on the accelerator if there is one, else in Triton's interpreter with small shapes."""

import os

import pytest
import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import HAVE_TRITON

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CARD else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if CARD else torch.float16]
# How far a result rounded to the dtype may be from one that was not, relative to its norm.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

needs_triton = pytest.mark.skipif(
    not HAVE_TRITON or not (CARD or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs Triton, and an accelerator or its interpreter",
)


def apart(out: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what was wanted; infinite if anything is not a number."""
    out, wanted = out.detach().double(), wanted.detach().double()
    if not out.isfinite().all():
        return float("inf")
    return float((out - wanted).norm() / wanted.norm().clamp(min=1e-30))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int | None = None) -> Tensor:
    """Normal numbers, made on the CPU so that they are the same everywhere; without a ``seed``, the test's own."""
    generator = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)
