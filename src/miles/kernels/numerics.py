"""Numerics of a model: the fastest kernels, or batch-invariant ones (``--parity exact``). No torch.

With batch-invariant numerics the result of a token is a function of the token, its past and the weights: not of the
other tokens in the batch, of how its past was chunked, or of whether engine or trainer computes it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

# Channels of a head that the batch-invariant Triton kernels of softmax attention take at most.
MAX_HEAD_DIM = 256

KVCacheDtype = Literal["auto", "fp8_e4m3"]
"""Storage of keys and values, under SGLang's names: auto is the dtype of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Which kernels a model, its engine and its trainer use; models of different numerics may share a process.

    ``kv_cache_dtype`` is how an engine stores keys and values; a trainer rounds its own in the same way.

    >>> numerics_from_parity("exact").batch_invariant
    True
    """

    batch_invariant: bool
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def fp8_kv_cache(self) -> bool:
        """Whether keys and values are stored in FP8."""
        return self.kv_cache_dtype == "fp8_e4m3"


FAST = Numerics(batch_invariant=False)
BATCH_INVARIANT = Numerics(batch_invariant=True)


def numerics_from_parity(parity: Literal["fast", "exact"], kv_cache_dtype: KVCacheDtype = "auto") -> Numerics:
    """Return the numerics of ``--parity`` and ``--kv-cache-dtype``."""
    return Numerics(batch_invariant=parity == "exact", kv_cache_dtype=kv_cache_dtype)


def configure_cublas(numerics: Numerics) -> None:
    """Make the matmuls of cuBLAS, which compute the gradients, reproducible if the numerics are batch-invariant.

    Call it once in each process, before its first matmul: cuBLAS reads the environment variable when it is loaded.
    """
    if numerics.batch_invariant:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
