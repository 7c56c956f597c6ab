"""Delta encoding of weight updates: changed positions and their new bits, or a whole tensor.

Format: the label of the base version, a newline, and a compressed safetensors file. ``NAME`` is a
whole tensor; ``NAME|at`` (gaps between changed positions) and ``NAME|to`` (the new bits) are a delta, empty if the
tensor is unchanged. Receivers verify the result by digests that are sent separately.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from miles.core.errors import SyncError

MAX_SPARSE_FRACTION = 0.2
"""Maximum changed fraction of a tensor that is sent as a delta; above it the whole tensor is sent."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT, _TO = "|at", "|to"
_LEVEL = 1


def encode_delta(label: str, before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bytes:
    """Encode the changes from ``before`` (the version ``label``) to ``now``; all tensors on the host."""
    parts: dict[str, Tensor] = {}
    for name, tensor in now.items():
        old = before.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype or tensor.numel() >= 1 << 31:
            parts[name] = tensor.contiguous()
            continue
        gaps, bits = _find_changes(old, tensor)
        if gaps.numel() > MAX_SPARSE_FRACTION * tensor.numel():
            parts[name] = tensor.contiguous()
        else:
            parts[name + _AT], parts[name + _TO] = gaps, bits
    return label.encode() + b"\n" + zlib.compress(safetensors.torch.save(parts), _LEVEL)


def apply_delta(body: bytes, label: str, current: Callable[[str], Tensor], limit: int) -> dict[str, Tensor]:
    """Apply a delta against version ``label``; ``current`` returns the current tensor by name.

    SyncError if the delta is against another version, or larger than ``limit`` bytes.
    """
    head, _, packed = body.partition(b"\n")
    base = head.decode(errors="replace")
    if base != label:
        raise SyncError(f"The delta is against version {base[:60]!r}, but this engine has {label!r}; send all tensors.")
    parts = _decompress(packed, limit)
    found = {name: tensor for name, tensor in parts.items() if not name.endswith((_AT, _TO))}
    for key, gaps in parts.items():
        name = key.removesuffix(_AT)
        if name == key:
            continue
        if name + _TO not in parts:
            raise SyncError(f"The delta of {name} has positions but no values.")
        found[name] = _apply_changes(name, current(name), gaps, parts[name + _TO])
    return found


def _find_changes(old: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    bits = _flat(now)
    positions = (bits != _flat(old)).nonzero().view(-1)
    gaps = torch.diff(positions, prepend=positions.new_zeros(1)).to(torch.int32)
    return gaps, bits[positions]


def _apply_changes(name: str, current: Tensor, gaps: Tensor, values: Tensor) -> Tensor:
    if not len(gaps) and not len(values):
        return current.detach()
    updated = current.detach().clone(memory_format=torch.contiguous_format)
    bits = _flat(updated)
    positions = gaps.to(torch.int64).cumsum(0)
    fits = gaps.dim() == values.dim() == 1 and len(gaps) == len(values) and values.dtype == bits.dtype
    if not fits or bool((gaps < 0).any()) or (len(positions) and int(positions[-1]) >= bits.numel()):
        raise SyncError(f"The delta of {name} does not fit the current tensor.")
    bits[positions.to(bits.device)] = values.to(bits.device)
    return updated


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()])


def _decompress(packed: bytes, limit: int) -> dict[str, Tensor]:
    try:
        reader = zlib.decompressobj()
        raw = reader.decompress(packed, limit)
        if reader.unconsumed_tail or not reader.eof:
            raise SyncError(f"The delta is truncated, or larger than {limit} bytes.")
        return safetensors.torch.load(raw)
    except (zlib.error, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise SyncError(f"The body does not contain a tensor delta: {error}.") from error
