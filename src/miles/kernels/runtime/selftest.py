"""On-device self-test: compares the engine's Triton kernels with torch on one GPU.

Shapes: R rows of X numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.kernels.runtime.selftest_cases import FP32_SHAPES, SelfTestCase, SelfTestContext, SelfTestShapes, list_cases

# Tolerated relative error of a row that was rounded to a dtype, also in intermediate results.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """Relative error of a kernel against torch and its tolerance, or the error that kept it from running."""

    name: str
    dtype: str
    relative_error: float = 0.0
    tolerance: float = 0.0
    error: str | None = None

    @property
    def has_passed(self) -> bool:
        """Whether the difference is explained by rounding."""
        return self.error is None and self.relative_error <= self.tolerance

    @property
    def tolerance_ratio(self) -> float:
        """The error relative to its tolerance."""
        return (
            self.relative_error / self.tolerance
            if self.tolerance
            else 0.0
            if self.relative_error == 0
            else float("inf")
        )


def run_selftest(
    device: torch.device, dtype: torch.dtype, shapes: SelfTestShapes | None = None
) -> Iterator[SelfTestResult]:
    """Run every kernel in turn, until the GPU does not survive one."""
    shapes = shapes or (SelfTestShapes() if dtype.itemsize == 2 else FP32_SHAPES)
    pending = [*list_cases(shapes)] if _is_responding(device) else []
    while pending:
        result = _run_case(pending.pop(0), SelfTestContext(device=device, dtype=dtype, shapes=shapes))
        if result.error is not None and not _is_responding(device):
            yield replace(
                result, error=f"{result.error} ({len(pending)} further tests were skipped: the GPU no longer responds)"
            )
            return
        yield result


def compute_relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest norm of a row's difference, relative to the norm of the expected row; a vector is one row.

    Infinite if any number is not finite. For integers, the fraction that differs.
    """
    assert got.shape == expected.shape, f"got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not got.is_floating_point():
        return float((got != expected).double().mean())
    got_RX, expected_RX = (x.double().view(1, -1) if x.ndim == 1 else x.double().flatten(1) for x in (got, expected))
    if not (got_RX.isfinite().all() and expected_RX.isfinite().all()):
        return float("inf")
    return float(((got_RX - expected_RX).norm(dim=1) / expected_RX.norm(dim=1).clamp(min=1e-30)).max())


def _run_case(case: SelfTestCase, context: SelfTestContext) -> SelfTestResult:
    worst = SelfTestResult(name=case.name, dtype=_dtype_name(context.dtype))
    try:
        with torch.inference_mode():
            for got, expected in case.run(context):
                tolerance = case.slack * ROUNDING[got.dtype] if got.is_floating_point() else 0.0
                result = replace(worst, relative_error=compute_relative_error(got, expected), tolerance=tolerance)
                worst = max(worst, result, key=lambda result: result.tolerance_ratio)
    except Exception as error:  # any failure means that the kernel cannot be used here
        return replace(worst, error=_describe_error(error))
    return worst


def _describe_error(error: BaseException) -> str:
    """One line of an error, of its root cause where known."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    # A compiler reports the location first and the message last.
    return f"{type(error).__name__}: {lines[-1] if lines[0].startswith('at ') else lines[0]}"


def _is_responding(device: torch.device) -> bool:
    """Whether the device still computes: after some failures it does not, for the rest of the process."""
    try:
        return torch.ones(1, device=device).item() == 1
    except RuntimeError:
        return False


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
