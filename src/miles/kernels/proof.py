"""Whether the engine's device code gives, on one card, the numbers that plain torch gives there.

Shapes: R rows of X numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.kernels.proof_cases import FEWER, Case, Ground, Shapes, cases

# How far a row that was rounded to a dtype, here and there on its way too, may be from one that never was.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How far a kernel is from torch, as a share of what was wanted, and how far it may be; or why none can say."""

    name: str
    dtype: str
    apart: float = 0.0
    allowed: float = 0.0
    error: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether all there is between them is rounding."""
        return self.error is None and self.apart <= self.allowed

    @property
    def strain(self) -> float:
        """How much of what is allowed was taken."""
        return self.apart / self.allowed if self.allowed else 0.0 if self.apart == 0 else float("inf")


def prove(device: torch.device, dtype: torch.dtype, shapes: Shapes | None = None) -> Iterator[Outcome]:
    """Try every kernel in turn, until the card does not survive one; nothing is tried on a card that did not."""
    shapes = shapes or (Shapes() if dtype.itemsize == 2 else FEWER)
    waiting = [*cases(shapes)] if _answers(device) else []
    while waiting:
        outcome = _tried(waiting.pop(0), Ground(device=device, dtype=dtype, shapes=shapes))
        if outcome.error is not None and not _answers(device):
            yield replace(outcome, error=f"{outcome.error} (and {len(waiting)} behind it not tried: the card is lost)")
            return
        yield outcome


def apart(got: Tensor, wanted: Tensor) -> float:
    """The largest norm of a difference of two rows, over that of the row wanted; a vector is one row.

    Infinite where anything is not a number. Of whole numbers, the share of those that are not the same.
    """
    assert got.shape == wanted.shape, f"{tuple(got.shape)} where {tuple(wanted.shape)} was wanted"
    if not got.is_floating_point():
        return float((got != wanted).double().mean())
    got_RX, wanted_RX = (x.double().view(1, -1) if x.ndim == 1 else x.double().flatten(1) for x in (got, wanted))
    if not (got_RX.isfinite().all() and wanted_RX.isfinite().all()):
        return float("inf")
    return float(((got_RX - wanted_RX).norm(dim=1) / wanted_RX.norm(dim=1).clamp(min=1e-30)).max())


def _tried(case: Case, ground: Ground) -> Outcome:
    worst = Outcome(name=case.name, dtype=_named(ground.dtype))
    try:
        with torch.inference_mode():
            for got, wanted in case.run(ground):
                allowed = case.slack * ROUNDING[got.dtype] if got.is_floating_point() else 0.0
                found = replace(worst, apart=apart(got, wanted), allowed=allowed)
                worst = max(worst, found, key=lambda outcome: outcome.strain)
    except Exception as error:  # whatever it is, it is why this kernel cannot be had here
        return replace(worst, error=_told(error))
    return worst


def _told(error: BaseException) -> str:
    """What an error says in a line, of what caused it where that is known."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["it says no more"]
    # A compiler says where first, and what at last.
    return f"{type(error).__name__}: {lines[-1] if lines[0].startswith('at ') else lines[0]}"


def _answers(device: torch.device) -> bool:
    """Whether the device still computes: after some failures it does not, for as long as the process lives."""
    try:
        return torch.ones(1, device=device).item() == 1
    except RuntimeError:
        return False


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
