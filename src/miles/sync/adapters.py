"""Serialization of LoRA adapters for engines that have the base weights: factors, and digests of the base matrices.

Format: a line of JSON (the scale, and the digest of the base of every matrix concerned) and a safetensors file.
``NAME|A`` and ``NAME|B`` are the factors of a matrix; a matrix without factors equals its base. Receivers verify the
merged matrices by digests that are sent separately.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
from torch import Tensor

from miles.core.errors import SyncError

Pair = tuple[Tensor, Tensor]
"""The factors of a matrix: [r, I] and [O, r]."""

_A, _B = "|A", "|B"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPayload:
    """LoRA factors by matrix name, and the digest of the base of each matrix concerned."""

    scale: float
    base: Mapping[str, int]
    factors: Mapping[str, Pair]


def pack_adapters(payload: AdapterPayload) -> bytes:
    """Serialize the adapters."""
    header = {"scale": payload.scale, "base": {name: str(number) for name, number in payload.base.items()}}
    parts: dict[str, Tensor] = {}
    for name, (a_rI, b_Or) in payload.factors.items():
        parts[name + _A], parts[name + _B] = (factor.detach().cpu().contiguous() for factor in (a_rI, b_Or))
    return json.dumps(header).encode() + b"\n" + safetensors.torch.save(parts)


def unpack_adapters(body: bytes) -> AdapterPayload:
    """Parse adapters; SyncError if the body is invalid."""
    head, _, raw = body.partition(b"\n")
    try:
        header = json.loads(head)
        scale, base = float(header["scale"]), {str(name): int(number) for name, number in header["base"].items()}
        parts = safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SyncError(f"The body does not contain adapters: {error}.") from error
    names = {key[: -len(_A)] for key in parts}
    for name in names:
        a_rI, b_Or = parts.get(name + _A), parts.get(name + _B)
        if name not in base or a_rI is None or b_Or is None or a_rI.dim() != 2 or b_Or.dim() != 2:
            raise SyncError(f"The adapter of {name} is not two matrices and a digest of its base.")
        if len(a_rI) != b_Or.shape[1]:
            raise SyncError(f"The factors of {name} have ranks {len(a_rI)} and {b_Or.shape[1]}.")
    return AdapterPayload(
        scale=scale, base=base, factors={name: (parts[name + _A], parts[name + _B]) for name in names}
    )
