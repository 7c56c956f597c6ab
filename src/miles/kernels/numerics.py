"""Numerics of a model: the fastest kernels, or batch-invariant ones (``--parity exact``). No torch.

With batch-invariant numerics the result of a token is a function of the token, its past and the weights: not of the
other tokens in the batch, of how its past was chunked, or of whether engine or trainer computes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Which kernels a model, its engine and its trainer use; models of different numerics may share a process.

    >>> numerics_from_parity("exact").batch_invariant
    True
    """

    batch_invariant: bool


FAST = Numerics(batch_invariant=False)
BATCH_INVARIANT = Numerics(batch_invariant=True)


def numerics_from_parity(parity: Literal["fast", "exact"]) -> Numerics:
    """Return the numerics of ``--parity``."""
    return BATCH_INVARIANT if parity == "exact" else FAST


def configure_cublas(numerics: Numerics) -> None:
    """Make the matmuls of cuBLAS, which compute the gradients, reproducible if the numerics are batch-invariant.

    Call it once in each process, before its first matmul: cuBLAS reads the environment variable when it is loaded.
    """
    if numerics.batch_invariant:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
