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
_COLUMNS, _ROWS, _CHUNK, _FEW = 4096, 32, 1 << 22, 2048
# 15 bits of an element times the number of its step, summed over 64 steps, stay within 32 bits. Steps go by fours.
_LANES, _STEPS, _WARPS = 1024, 64, 8


def sums_of(tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Sums]:
    """``plain`` and ``placed`` of each; with ``into``, each is copied there too, contiguous, of the same dtype.

    What is copied is what is counted: the numbers are of the values that were stored.
    """
    assert into is None or all(tensor.is_contiguous() for tensor in into), "what is copied into lies in one piece"
    found: list[Sums] = [(0, 0)] * len(tensors)
    fast = _by_device_code(tensors)
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


class Tally:
    """The sums of the same tensors over and over: what a device must know of them stays there.

    With ``into`` they are copied on the way, as by ``sums_of``. Of tensors that device code counts it has addresses
    only: whoever starts it answers for their being there still.
    """

    def __init__(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> None:
        self._count = len(tensors)
        fast = _by_device_code(tensors) if all(tensor.is_contiguous() for tensor in tensors) else []
        self._launches = _launches([tensors[i] for i in fast], None if into is None else [into[i] for i in fast])
        self._fast = np.array(fast, np.int64)
        self._slow = sorted(set(range(len(tensors))).difference(fast))
        self._tensors = [tensors[i] for i in self._slow]
        self._into = None if into is None else [into[i] for i in self._slow]
        self._there: list[tuple[Array, Tensor]] = []
        self._done: list[torch.cuda.Event] = []
        self._rest: list[Sums] = []

    def start(self) -> None:
        """Begin to count; where device code does, nothing is waited for."""
        self._there = [(which, launch.fetched()) for which, launch in self._launches]
        self._done = []
        for device in {launch.device for _, launch in self._launches if launch.device.type == "cuda"}:
            self._done.append(torch.cuda.Event())
            self._done[-1].record(torch.cuda.current_stream(device))
        self._rest = sums_of(self._tensors, self._into)

    def read(self) -> Array:
        """``plain`` and ``placed`` of each, [N, 2] of 64 bits, when what was started is done."""
        for event in self._done:
            event.synchronize()
        found_N2 = np.zeros((self._count, 2), np.uint64)
        for which, pairs in self._there:
            found_N2[self._fast[which]] = pairs.numpy().view(np.uint64)
        if self._slow:
            found_N2[self._slow] = np.array(self._rest, np.uint64)
        return found_N2


def _by_device_code(tensors: Sequence[Tensor]) -> list[int]:
    """Which of them are counted where they are."""
    return [
        i
        for i, tensor in enumerate(tensors)
        if tensor.is_cuda and HAVE_TRITON and tensor.element_size() < 8 and tensor.numel()
    ]


def _bits(tensor: Tensor) -> Tensor:
    flat_N = tensor.detach().contiguous().view(-1)
    return flat_N.view(_BITS[flat_N.element_size()])


# -- a host ---------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _weights(columns: int) -> Array:
    """One column of ones, one of places."""
    return np.stack((np.ones(columns), np.arange(1.0, columns + 1)), axis=1)


@lru_cache(maxsize=1)
def _places(count: int) -> Array:
    return np.arange(1, count + 1, dtype=np.int64)


def _on_host(bits_N: Tensor, block_GC: Array) -> Sums:
    """In float64, which is exact: 16 bits of an element times 12 of its column, 4,096 times, are less than 53."""
    numbers_N = bits_N.numpy()
    if len(numbers_N) <= _FEW:  # a block would mostly be filled with nothing
        wide_N = numbers_N.astype(np.int64)
        return int(wide_N.sum()), int(np.dot(wide_N, _places(_FEW)[: len(wide_N)]))
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
        for step in range(0, STEPS, 4):
            from_L = source + step * L + lane_L
            to_L = target + step * L + lane_L
            if ALIGNED:
                from_L = tl.max_contiguous(tl.multiple_of(from_L, 16), L)
                to_L = tl.max_contiguous(tl.multiple_of(to_L, 16), L)
            # All four are asked for before the first is stored: behind a store nothing is read early.
            a_L, b_L, c_L, d_L = tl.load(from_L), tl.load(from_L + L), tl.load(from_L + 2 * L), tl.load(from_L + 3 * L)
            if COPY:
                tl.store(to_L, a_L)
                tl.store(to_L + L, b_L)
                tl.store(to_L + 2 * L, c_L)
                tl.store(to_L + 3 * L, d_L)
            c_wide_L, d_wide_L = c_L.to(WIDE), d_L.to(WIDE)
            high_L = c_wide_L + d_wide_L
            four_L = a_L.to(WIDE) + b_L.to(WIDE) + high_L
            plain_L += four_L
            stepped_L += four_L * step + b_L.to(WIDE) + high_L * 2 + d_wide_L
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


class _Launch:
    """One launch over tensors of one device, size of elements and alignment; what it needs is on the device."""

    def __init__(
        self, flat: Sequence[Tensor], there: Sequence[Tensor] | None, device: torch.device, size: int, aligned: bool
    ) -> None:
        counts = np.array([tensor.numel() for tensor in flat], np.int64)
        tiles = -(-counts // (_LANES * _STEPS))
        at = np.array([tensor.data_ptr() for tensor in flat], np.int64)
        to = at if there is None else np.array([tensor.data_ptr() for tensor in there], np.int64)
        table = np.stack((at, np.cumsum(tiles) - tiles, counts, to), axis=1)
        self.device = device
        self._rows_T = torch.from_numpy(np.repeat(np.arange(len(flat), dtype=np.int32), tiles)).to(device)
        self._table = torch.from_numpy(table).to(device)
        self._size, self._copies, self._aligned = size, there is not None, aligned
        self._out = torch.zeros((len(flat), 2), dtype=torch.int64, device=device)
        self._host = torch.empty(self._out.shape, dtype=torch.int64, pin_memory=self._out.is_cuda)

    def fetched(self) -> Tensor:
        """The sums, on their way to the host, where they lie until the next time."""
        return self._host.copy_(self(), non_blocking=True)

    def __call__(self) -> Tensor:
        """The sums, on their way."""
        out = self._out.zero_()
        bits = {1: tl.int8, 2: tl.int16, 4: tl.int32}[self._size]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else torch.no_grad():
            _sum_tiles[(len(self._rows_T),)](
                self._rows_T,
                self._table,
                out,
                BITS=bits,
                WIDE=tl.int64 if self._size == 4 else tl.int32,
                L=_LANES,
                STEPS=_STEPS,
                COPY=self._copies,
                ALIGNED=self._aligned,
                num_warps=_WARPS,
            )
        return out


def _launches(flat: Sequence[Tensor], there: Sequence[Tensor] | None) -> list[tuple[Array, _Launch]]:
    """As few as there are kinds of them, and which of the tensors each is of."""
    kinds: dict[tuple[torch.device, int, bool], list[int]] = {}
    for i, tensor in enumerate(flat):
        aligned = tensor.data_ptr() % 16 == 0 and (there is None or there[i].data_ptr() % 16 == 0)
        kinds.setdefault((tensor.device, tensor.element_size(), aligned), []).append(i)
    return [
        (
            np.array(which),
            _Launch([flat[i] for i in which], None if there is None else [there[i] for i in which], *kind),
        )
        for kind, which in kinds.items()
    ]


def _on_device(flat: Sequence[Tensor], there: Sequence[Tensor] | None) -> list[Sums]:
    found: list[Sums] = [(0, 0)] * len(flat)
    for which, launch in _launches(flat, there):
        for i, (plain, placed) in zip(which.tolist(), launch().tolist(), strict=True):
            found[i] = (plain, placed)
    return found
