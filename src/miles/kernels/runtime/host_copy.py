"""Host-to-device copies through pinned memory, which wait neither for the device nor for the copy."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(values: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor in host memory to the device, in ``dtype`` if it is given.

    A copy of more than 64 KiB from ordinary memory would wait until the device has run everything before it. Torch
    keeps the pinned memory until the copy is done.
    """
    if torch.device(device).type != "cuda":
        return values.to(device=device, dtype=dtype)
    return values.to(dtype=dtype).pin_memory().to(device, non_blocking=True)
