"""Top-k selections of sparse-attention indexers on the wire, in SGLang's encoding: base64 of int32, -1 not recorded.

Shapes: T tokens, L layers with an indexer, k entries per token.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

import numpy as np

from miles.core.errors import EngineError
from miles.core.types import Array


def encode_indexer_topk(selected_TLk: Array) -> str:
    """Encode recorded selections, whose dtype's maximum means "not recorded"."""
    missing_TLk = selected_TLk == np.iinfo(selected_TLk.dtype).max
    return base64.b64encode(np.where(missing_TLk, -1, selected_TLk.astype(np.int64)).astype("<i4").tobytes()).decode()


def decode_indexer_topk(
    text: Any, *, tokens: int, layers: int, count: int, dtype: Literal["uint16", "uint32"]
) -> Array:
    """Decode the selections of so many ``tokens``; EngineError if they cannot be of this model."""
    if not isinstance(text, str):
        raise EngineError(
            "the engine's response has no indexer_topk, which --use-rollout-indexer-replay needs; check that the "
            "server is miles serve with --engine-return-indexer-topk."
        )
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"indexer_topk in the engine's response is not base64 ({error}).") from error
    if len(raw) != 4 * tokens * layers * count:
        raise EngineError(
            f"indexer_topk in the engine's response has {len(raw)} bytes instead of {4 * tokens * layers * count} for "
            f"{tokens} tokens, {layers} layers and {count} entries; check that the engine serves the same model."
        )
    found_TLk = np.frombuffer(raw, "<i4").reshape(tokens, layers, count)
    # A token selects itself and tokens before it; pools and blocks have smaller numbers.
    if found_TLk.size and not (
        int(found_TLk.min()) >= -1 and bool((found_TLk <= np.arange(tokens)[:, None, None]).all())
    ):
        raise EngineError(
            "indexer_topk in the engine's response selects positions that a token does not see; check that the engine "
            "serves the same model."
        )
    return np.where(found_TLk < 0, np.iinfo(dtype).max, found_TLk).astype(dtype)
