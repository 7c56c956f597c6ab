"""Arrays to the device and tensors back, without waiting: through pinned memory, several arrays in one copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.order import Drawn, Looked
from miles.core.errors import EngineError
from miles.core.types import Array


class Sender:
    """Takes arrays to a device. What it returns may be overwritten, but not by the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, *arrays: Array) -> list[Tensor]:
        """Tensors of these arrays, which have one dtype."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        flat = np.concatenate([array.ravel() for array in arrays])
        packed = torch.empty(len(flat), dtype=torch.from_numpy(flat[:0]).dtype, pin_memory=True)
        packed.numpy()[:] = flat
        there = packed.to(self._device, non_blocking=True)
        parts = there.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class Landing:
    """A flight: what a step gives, on its way to the host from the moment this is made."""

    def __init__(
        self,
        tokens_D: Tensor,
        logprobs_D: Tensor,
        *,
        routed_TLx: Tensor | None = None,
        looked: tuple[Tensor, Tensor, Tensor] | None = None,
        scores_N: Tensor | None = None,
        scores_looked: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self._tokens_D, self._logprobs_D = _fetch(tokens_D), _fetch(logprobs_D)
        self._routed_TLx = None if routed_TLx is None else _fetch(routed_TLx)
        self._looked = None if looked is None else tuple(_fetch(part) for part in looked)
        self._scores_N = None if scores_N is None else _fetch(scores_N)
        self._scores_looked = None if scores_looked is None else tuple(_fetch(part) for part in scores_looked)
        self._there: torch.cuda.Event | None = None
        if tokens_D.is_cuda:
            self._there = torch.cuda.Event()
            self._there.record()

    def land(self) -> Drawn:
        """Wait for the device; an ``EngineError`` when what it computed is not finite."""
        if self._there is not None:
            self._there.synchronize()
        scores_N = None if self._scores_N is None else self._scores_N.numpy()
        logprobs_D = self._logprobs_D.numpy()
        if not np.isfinite(logprobs_D).all() or (scores_N is not None and np.isnan(scores_N).any()):
            raise EngineError("the model's logits are not finite: its weights are broken, or too large for their dtype")
        routed = self._routed_TLx
        return Drawn(
            tokens_D=self._tokens_D.numpy(),
            logprobs_D=logprobs_D,
            routed_TLx=None if routed is None else routed.numpy(),
            looked=_looked(self._looked),
            scores_N=scores_N,
            scores_looked=_looked(self._scores_looked),
        )


def _fetch(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _looked(parts: tuple[Tensor, ...] | None) -> Looked | None:
    if parts is None:
        return None
    tokens_Rk, logprobs_Rk, logprobs_W = (part.numpy() for part in parts)
    return Looked(tokens_Rk=tokens_Rk, logprobs_Rk=logprobs_Rk, logprobs_W=logprobs_W)
