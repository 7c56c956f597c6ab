"""What changed between two versions of tensors, small enough to send: places and new bits, or a whole tensor.

The form: the label of the version it is against, a line end, and a compressed safetensors file. ``NAME`` in it is a
whole tensor; ``NAME|at`` (the gaps between places) and ``NAME|to`` (the bits there) are changes of one, none where it
is as it was. Chains are proven by digests of what comes out, which travel apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from miles.core.errors import SyncError

FEW = 0.2
"""Of a tensor, at most so much is sent as places and bits: more is a whole tensor."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT, _TO = "|at", "|to"
_LEVEL = 1


def difference(label: str, before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bytes:
    """What of ``now`` is not in ``before``, which is called ``label``; all on the host."""
    parts: dict[str, Tensor] = {}
    for name, tensor in now.items():
        old = before.get(name)
        if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype or tensor.numel() >= 1 << 31:
            parts[name] = tensor.contiguous()
            continue
        at, to = _changed(old, tensor)
        if at.numel() > FEW * tensor.numel():
            parts[name] = tensor.contiguous()
        else:
            parts[name + _AT], parts[name + _TO] = at, to
    return label.encode() + b"\n" + zlib.compress(safetensors.torch.save(parts), _LEVEL)


def applied(body: bytes, label: str, current: Callable[[str], Tensor], limit: int) -> dict[str, Tensor]:
    """The tensors that come out of a difference against ``label``; ``current`` gives what is there by name.

    Refuses (SyncError) one that is against another version, or larger than ``limit`` bytes.
    """
    head, _, packed = body.partition(b"\n")
    base = head.decode(errors="replace")
    if base != label:
        raise SyncError(f"The changes are against version {base[:60]!r}, and here is {label!r}; send all tensors.")
    parts = _unpacked(packed, limit)
    found = {name: tensor for name, tensor in parts.items() if not name.endswith((_AT, _TO))}
    for key, gaps in parts.items():
        name = key.removesuffix(_AT)
        if name == key:
            continue
        if name + _TO not in parts:
            raise SyncError(f"The changes of {name} have places and no bits.")
        found[name] = _patched(name, current(name), gaps, parts[name + _TO])
    return found


def _changed(old: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    bits = _flat(now)
    places = (bits != _flat(old)).nonzero().view(-1)
    gaps = torch.diff(places, prepend=places.new_zeros(1)).to(torch.int32)
    return gaps, bits[places]


def _patched(name: str, current: Tensor, gaps: Tensor, to: Tensor) -> Tensor:
    if not len(gaps) and not len(to):
        return current.detach()
    fresh = current.detach().clone(memory_format=torch.contiguous_format)
    bits = _flat(fresh)
    places = gaps.to(torch.int64).cumsum(0)
    fits = gaps.dim() == to.dim() == 1 and len(gaps) == len(to) and to.dtype == bits.dtype
    if not fits or bool((gaps < 0).any()) or (len(places) and int(places[-1]) >= bits.numel()):
        raise SyncError(f"The changes of {name} do not fit the tensor there is.")
    bits[places.to(bits.device)] = to.to(bits.device)
    return fresh


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_BITS[flat.element_size()])


def _unpacked(packed: bytes, limit: int) -> dict[str, Tensor]:
    try:
        reader = zlib.decompressobj()
        raw = reader.decompress(packed, limit)
        if reader.unconsumed_tail or not reader.eof:
            raise SyncError(f"The changes are cut off, or more than {limit} bytes.")
        return safetensors.torch.load(raw)
    except (zlib.error, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise SyncError(f"The body holds no changes of tensors: {error}.") from error
