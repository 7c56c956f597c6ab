"""Routed experts of MoE layers: a compact integer array per token, and conversion to and from SGLang's encoding.

Shapes: T tokens, L MoE layers, k experts per token.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.errors import EngineError
from miles.core.types import Array


def expert_dtype(experts: int) -> np.dtype[Any]:
    """Return the smallest unsigned dtype for so many experts whose maximum stays free to mean "not recorded".

    >>> expert_dtype(128), expert_dtype(256)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.dtype(np.uint8 if experts <= 255 else np.uint16 if experts <= 65535 else np.uint32)


def unrecorded_id(dtype: np.dtype[Any]) -> int:
    """Return the value that means "not recorded"."""
    return int(np.iinfo(dtype).max)


def to_signed_ids(routed_TLk: Array) -> NDArray[np.signedinteger[Any]]:
    """Convert to the smallest signed dtype that holds all experts, with -1 for "not recorded"."""
    signed_dtype = {1: np.int16, 2: np.int32}.get(routed_TLk.dtype.itemsize, np.int64)
    out_TLk = routed_TLk.astype(signed_dtype)
    out_TLk[routed_TLk == unrecorded_id(routed_TLk.dtype)] = -1
    return out_TLk


def encode_for_sglang(routed_TLk: Array) -> str:
    """Encode as SGLang's ``routed_experts``: base64 of int32, -1 for "not recorded"."""
    return base64.b64encode(to_signed_ids(routed_TLk).astype("<i4").tobytes()).decode("ascii")


def decode_from_sglang(text: str, *, tokens: int, layers: int, top_k: int, experts: int) -> Array:
    """Decode SGLang's ``routed_experts`` of so many ``tokens``; EngineError if it cannot be of this model."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routed_experts in the engine's response is not base64 ({error}).") from error
    if len(raw) != 4 * tokens * layers * top_k:
        raise EngineError(
            f"routed_experts in the engine's response has {len(raw)} bytes instead of {4 * tokens * layers * top_k} "
            f"for {tokens} tokens, {layers} layers and top-{top_k}; check that the engine serves the same model."
        )
    ids_TLk = np.frombuffer(raw, "<i4").reshape(tokens, layers, top_k)
    if ids_TLk.size and not (int(ids_TLk.min()) >= -1 and int(ids_TLk.max()) < experts):
        raise EngineError(
            f"routed_experts in the engine's response names expert {int(ids_TLk.max())}, but the model has {experts}; "
            "check that the engine serves the same model."
        )
    dtype = expert_dtype(experts)
    return np.where(ids_TLk < 0, unrecorded_id(dtype), ids_TLk).astype(dtype)
