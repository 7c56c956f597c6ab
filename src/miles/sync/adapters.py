"""Adapters on their way to engines that have the base: small factors, and the digests of what they are added to.

The form: a line of JSON (the scale, and the digest of the base of every matrix that is meant) and a safetensors file.
``NAME|A`` and ``NAME|B`` in it are the factors of a matrix; one that has none is its base. What comes out is proven by
digests of the merged matrices, which travel apart.

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
class Parcel:
    """Factors by the name of their matrix, and the digest of the base of each matrix that is meant."""

    scale: float
    base: Mapping[str, int]
    factors: Mapping[str, Pair]


def packed(parcel: Parcel) -> bytes:
    """As bytes."""
    head = {"scale": parcel.scale, "base": {name: str(number) for name, number in parcel.base.items()}}
    parts: dict[str, Tensor] = {}
    for name, (a_rI, b_Or) in parcel.factors.items():
        parts[name + _A], parts[name + _B] = (factor.detach().cpu().contiguous() for factor in (a_rI, b_Or))
    return json.dumps(head).encode() + b"\n" + safetensors.torch.save(parts)


def unpacked(body: bytes) -> Parcel:
    """Refuses (SyncError) what is no parcel."""
    head, _, raw = body.partition(b"\n")
    try:
        told = json.loads(head)
        scale, base = float(told["scale"]), {str(name): int(number) for name, number in told["base"].items()}
        parts = safetensors.torch.load(raw)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SyncError(f"The body holds no adapters: {error}.") from error
    names = {key[: -len(_A)] for key in parts}
    for name in names:
        a_rI, b_Or = parts.get(name + _A), parts.get(name + _B)
        if name not in base or a_rI is None or b_Or is None or a_rI.dim() != 2 or b_Or.dim() != 2:
            raise SyncError(f"The adapter of {name} is not two matrices and a digest of its base.")
        if len(a_rI) != b_Or.shape[1]:
            raise SyncError(f"The factors of {name} have ranks {len(a_rI)} and {b_Or.shape[1]}.")
    return Parcel(scale=scale, base=base, factors={name: (parts[name + _A], parts[name + _B]) for name in names})
