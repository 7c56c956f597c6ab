"""Which experts a token went to, as one compact array: how it is stored, and how it travels in SGLang's form.

Shapes: T tokens, L layers with experts, k experts a token.
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
    """The smallest type that has a number for each of so many experts, and its greatest left to say "not recorded".

    >>> expert_dtype(128), expert_dtype(256)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.dtype(np.uint8 if experts <= 255 else np.uint16 if experts <= 65535 else np.uint32)


def unrecorded(dtype: np.dtype[Any]) -> int:
    """The number that says "not recorded"."""
    return int(np.iinfo(dtype).max)


def as_choices(routed_TLk: Array) -> NDArray[np.signedinteger[Any]]:
    """The same with -1 for what was not recorded, in the smallest signed type that holds all experts."""
    wide = {1: np.int16, 2: np.int32}.get(routed_TLk.dtype.itemsize, np.int64)
    out_TLk = routed_TLk.astype(wide)
    out_TLk[routed_TLk == unrecorded(routed_TLk.dtype)] = -1
    return out_TLk


def to_sglang(routed_TLk: Array) -> str:
    """As SGLang writes ``routed_experts``: base64 of int32, -1 for what was not recorded."""
    return base64.b64encode(as_choices(routed_TLk).astype("<i4").tobytes()).decode("ascii")


def from_sglang(text: str, *, tokens: int, layers: int, chosen: int, experts: int) -> Array:
    """SGLang's ``routed_experts`` of so many ``tokens``, as it is stored; refuses what cannot be this model's."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routed_experts of an engine's reply is not base64 ({error}).") from error
    if len(raw) != 4 * tokens * layers * chosen:
        raise EngineError(
            f"routed_experts of an engine's reply has {len(raw)} bytes, and {tokens} tokens of {layers} layers with "
            f"{chosen} experts each are {4 * tokens * layers * chosen}; is it the same model?"
        )
    wide_TLk = np.frombuffer(raw, "<i4").reshape(tokens, layers, chosen)
    if wide_TLk.size and not (int(wide_TLk.min()) >= -1 and int(wide_TLk.max()) < experts):
        raise EngineError(
            f"routed_experts of an engine's reply names expert {int(wide_TLk.max())}, and the model has {experts}; "
            "is it the same model?"
        )
    dtype = expert_dtype(experts)
    return np.where(wide_TLk < 0, unrecorded(dtype), wide_TLk).astype(dtype)
