"""Kinds of activations of MLPs and experts, among them SwiGLU with a limit on gate and up. No torch.

A kind is a string, which Triton kernels take as a constant.
"""

from __future__ import annotations

from typing import Literal, NewType

LimitedSwiglu = NewType("LimitedSwiglu", str)
"""SwiGLU whose up part is clamped to a limit on both sides, and whose gate at most to the limit."""

ActivationKind = Literal["silu", "gelu_tanh", "relu2", "swiglu_clamped"] | LimitedSwiglu

# The gate is clamped before its SiLU, or behind it.
LIMIT_BEFORE = "swiglu_limit_before:"
LIMIT_BEHIND = "swiglu_limit_behind:"


def limited_swiglu(limit: float, *, behind: bool = False) -> LimitedSwiglu:
    """Return the kind with this limit; ``behind``: the gate is clamped behind its SiLU instead of before it.

    >>> limited_swiglu(7)
    'swiglu_limit_before:7.0'
    """
    if not limit > 0:
        raise ValueError(f"the limit of a SwiGLU is {limit}, but must be above 0")
    return LimitedSwiglu(f"{LIMIT_BEHIND if behind else LIMIT_BEFORE}{float(limit)}")


def is_limited(kind: str) -> bool:
    """Return whether a kind is SwiGLU with a limit."""
    return kind.startswith((LIMIT_BEFORE, LIMIT_BEHIND))


def is_limited_before(kind: str) -> bool:
    """Return whether a kind clamps its gate before the SiLU."""
    return kind.startswith(LIMIT_BEFORE)


def read_limit(kind: str) -> float:
    """Return the limit of a kind.

    >>> read_limit(limited_swiglu(10.0, behind=True))
    10.0
    """
    return float(kind.partition(":")[2])
