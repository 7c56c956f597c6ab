"""Two sums over the bits of tensors, one of them weighted by place, of many tensors in one pass; copied on the way.

Each element counts as the signed integer its bits are: ``plain`` is the sum of all, ``placed`` of each times its place
from 1 on. Both wrap at 64 bits, so they do not depend on the order they are taken in, and the same bits give the same
numbers on every device. Shapes: N elements, C columns and G rows of a block that fits the cache, L lanes, T tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from miles.core.types import Array
from miles.kernels.device_code import HAVE_TRITON, jit, tl

Sums = tuple[int, int]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAP = (1 << 64) - 1
_COLUMNS, _ROWS, _CHUNK = 4096, 32, 1 << 22
# 15 bits of an element times the number of its step, summed over 32 steps, stay within 32 bits.
_LANES, _STEPS = 4096, 32


def sums_of(tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Sums]:
    """``plain`` and ``placed`` of each; with ``into``, each is copied there too, contiguous, of the same dtype.

    What is copied is what is counted: the numbers are of the values that were stored.
    """
    assert into is None or all(tensor.is_contiguous() for tensor in into), "what is copied into lies in one piece"
    found: list[Sums] = [(0, 0)] * len(tensors)
    fast = [
        i
        for i, tensor in enumerate(tensors)
        if tensor.is_cuda and HAVE_TRITON and tensor.element_size() < 8 and tensor.numel()
    ]
    # Addresses are enough for device code: a view of each of hundreds would take longer than to read them.
    whole = [tensors[i] if tensors[i].is_contiguous() else tensors[i].contiguous() for i in fast]
    for i, pair in zip(fast, _on_device(whole, None if into is None else [into[i] for i in fast]), strict=True):
        found[i] = pair
    block_GC = np.empty((_ROWS, _COLUMNS)) if len(fast) < len(tensors) else np.empty((0, 0))
    for i in sorted(set(range(len(tensors))).difference(fast)):
        bits_N = _bits(tensors[i])
        if into is not None:
            _bits(into[i]).copy_(bits_N)
        hosted = bits_N.device.type == "cpu" and bits_N.element_size() < 8
        found[i] = _on_host(bits_N, block_GC) if hosted else _by_torch(bits_N)
    return [(plain & _WRAP, placed & _WRAP) for plain, placed in found]


def _bits(tensor: Tensor) -> Tensor:
    flat_N = tensor.detach().contiguous().view(-1)
    return flat_N.view(_BITS[flat_N.element_size()])


# -- a host ---------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _weights(columns: int) -> Array:
    """One column of ones, one of places."""
    return np.stack((np.ones(columns), np.arange(1.0, columns + 1)), axis=1)


def _on_host(bits_N: Tensor, block_GC: Array) -> Sums:
    """In float64, which is exact: 16 bits of an element times 12 of its column, 4,096 times, are less than 53."""
    numbers_N = bits_N.numpy()
    if numbers_N.itemsize < 4:
        return _by_blocks(numbers_N, block_GC)
    low, high = (_by_blocks(numbers_N, block_GC, half) for half in ("low", "high"))
    return low[0] + (high[0] << 16), low[1] + (high[1] << 16)


def _by_blocks(numbers_N: Array, block_GC: Array, half: str = "") -> Sums:
    rows, columns = block_GC.shape
    plain = placed = 0
    weights_C2 = _weights(columns)
    step = rows * columns
    for start in range(0, len(numbers_N), step):
        part_N = numbers_N[start : start + step]
        if half:
            part_N = part_N & 0xFFFF if half == "low" else part_N >> 16
        used = -(-len(part_N) // columns)
        flat_N = block_GC[:used].reshape(-1)
        flat_N[: len(part_N)] = part_N
        flat_N[len(part_N) :] = 0
        sums_G2 = np.matmul(block_GC[:used], weights_C2).astype(np.int64)
        rows_G = sums_G2[:, 0]
        here = int(rows_G.sum())
        plain += here
        placed += int(sums_G2[:, 1].sum()) + int((rows_G * np.arange(used)).sum()) * columns + start * here
    return plain, placed


def _by_torch(bits_N: Tensor) -> Sums:
    plain = torch.zeros((), dtype=torch.int64, device=bits_N.device)
    placed = torch.zeros((), dtype=torch.int64, device=bits_N.device)
    for start in range(0, bits_N.numel(), _CHUNK):
        chunk_N = bits_N[start : start + _CHUNK].to(torch.int64)
        plain += chunk_N.sum()
        placed += (chunk_N * torch.arange(start + 1, start + 1 + chunk_N.numel(), device=bits_N.device)).sum()
    return int(plain), int(placed)


# -- a device -------------------------------------------------------------------------------


@jit
def _sum_tiles(
    rows_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    L: tl.constexpr,
    STEPS: tl.constexpr,
    COPY: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    row = tl.load(rows_ptr + tile).to(tl.int64)
    first = (tile - tl.load(table_ptr + row * 4 + 1)) * (L * STEPS)
    left = tl.load(table_ptr + row * 4 + 2) - first
    source = tl.load(table_ptr + row * 4).to(tl.pointer_type(BITS)) + first  # pyright: ignore[reportArgumentType]
    target = tl.load(table_ptr + row * 4 + 3).to(tl.pointer_type(BITS)) + first  # pyright: ignore[reportArgumentType]
    lane_L = tl.arange(0, L)
    plain_L = tl.zeros((L,), WIDE)
    stepped_L = tl.zeros((L,), WIDE)
    if left >= L * STEPS:  # a mask would keep lanes from being read together
        for step in range(STEPS):
            from_L = source + step * L + lane_L
            to_L = target + step * L + lane_L
            if ALIGNED:
                from_L = tl.max_contiguous(tl.multiple_of(from_L, 16), L)
                to_L = tl.max_contiguous(tl.multiple_of(to_L, 16), L)
            bits_L = tl.load(from_L)
            if COPY:
                tl.store(to_L, bits_L)
            plain_L += bits_L.to(WIDE)
            stepped_L += bits_L.to(WIDE) * step
    else:
        for step in range(STEPS):
            here_L = step * L + lane_L < left
            bits_L = tl.load(source + step * L + lane_L, mask=here_L, other=0)
            if COPY:
                tl.store(target + step * L + lane_L, bits_L, mask=here_L)
            plain_L += bits_L.to(WIDE)
            stepped_L += bits_L.to(WIDE) * step
    wide_L = plain_L.to(tl.int64)
    plain = tl.sum(wide_L)
    placed = plain * (first + 1) + tl.sum(stepped_L.to(tl.int64)) * L + tl.sum(wide_L * lane_L)
    tl.atomic_add(out_ptr + row * 2, plain)
    tl.atomic_add(out_ptr + row * 2 + 1, placed)


def _on_device(flat: Sequence[Tensor], there: Sequence[Tensor] | None) -> list[Sums]:
    found: list[Sums] = [(0, 0)] * len(flat)
    kinds: dict[tuple[torch.device, int, bool], list[int]] = {}
    for i, tensor in enumerate(flat):
        aligned = tensor.data_ptr() % 16 == 0 and (there is None or there[i].data_ptr() % 16 == 0)
        kinds.setdefault((tensor.device, tensor.element_size(), aligned), []).append(i)
    for (device, size, aligned), which in kinds.items():
        targets = None if there is None else [there[i] for i in which]
        pairs = _launched([flat[i] for i in which], targets, device, size, aligned)
        for i, (plain, placed) in zip(which, pairs, strict=True):
            found[i] = (plain, placed)
    return found


def _launched(
    flat: Sequence[Tensor], there: Sequence[Tensor] | None, device: torch.device, size: int, aligned: bool
) -> list[list[int]]:
    counts = np.array([tensor.numel() for tensor in flat], np.int64)
    tiles = -(-counts // (_LANES * _STEPS))
    at = np.array([tensor.data_ptr() for tensor in flat], np.int64)
    to = at if there is None else np.array([tensor.data_ptr() for tensor in there], np.int64)
    table = np.stack((at, np.cumsum(tiles) - tiles, counts, to), axis=1)
    rows_T = torch.from_numpy(np.repeat(np.arange(len(flat), dtype=np.int32), tiles)).to(device)
    out = torch.zeros((len(flat), 2), dtype=torch.int64, device=device)
    bits = {1: tl.int8, 2: tl.int16, 4: tl.int32}[size]
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        _sum_tiles[(len(rows_T),)](
            rows_T,
            torch.from_numpy(table).to(device),
            out,
            BITS=bits,
            WIDE=tl.int64 if size == 4 else tl.int32,
            L=_LANES,
            STEPS=_STEPS,
            COPY=there is not None,
            ALIGNED=aligned,
            num_warps=8,
        )
    return out.tolist()
