"""Order-independent checksums over the bits of many tensors in one pass, optionally copying them on the way.

Each element counts as the signed integer of its bits: ``plain`` is the sum of all, ``placed`` the sum of each times its
index from 1 on. Both wrap at 64 bits, so they do not depend on the order of summation, and the same bits give the same
numbers on every device. Shapes: N elements, C columns and G rows of a block that fits the cache, L lanes, T tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from miles.core.types import Array
from miles.kernels.runtime.triton_compat import HAVE_TRITON, jit, tl

Checksum = tuple[int, int]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WRAP = (1 << 64) - 1
_COLUMNS = 4096
_ROWS = 32
_CHUNK = 1 << 22
_MAX_UNBLOCKED = 1 << 16
# 15 bits of an element times the step number, summed over 64 steps, stay within 32 bits. Steps go by fours.
_LANES = 1024
_STEPS = 64
_WARPS = 8


def compute_checksums(tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> list[Checksum]:
    """``plain`` and ``placed`` of each tensor; with ``into``, each is also copied there (contiguous, same dtype).

    The checksums are those of the stored values.
    """
    assert into is None or all(tensor.is_contiguous() for tensor in into), "the tensors to copy into must be contiguous"
    checksums: list[Checksum] = [(0, 0)] * len(tensors)
    on_gpu = _select_gpu_tensors(tensors)
    # The kernel takes addresses: creating a view of each of hundreds of tensors would take longer than reading them.
    contiguous = [tensors[i] if tensors[i].is_contiguous() else tensors[i].contiguous() for i in on_gpu]
    for i, pair in zip(
        on_gpu, _checksum_gpu(contiguous, None if into is None else [into[i] for i in on_gpu]), strict=True
    ):
        checksums[i] = pair
    block_GC = np.empty((_ROWS, _COLUMNS)) if len(on_gpu) < len(tensors) else np.empty((0, 0))
    for i in sorted(set(range(len(tensors))).difference(on_gpu)):
        bits_N = _view_bits(tensors[i])
        if into is not None:
            _view_bits(into[i]).copy_(bits_N)
        on_cpu = bits_N.device.type == "cpu" and bits_N.element_size() < 8
        checksums[i] = _checksum_cpu(bits_N, block_GC) if on_cpu else _checksum_torch(bits_N)
    return [(plain & _WRAP, placed & _WRAP) for plain, placed in checksums]


class ChecksumBatch:
    """Repeated checksums of the same tensors, with the launch metadata kept on the device.

    With ``into`` they are copied on the way, as by ``compute_checksums``. Of tensors on a GPU it keeps only the
    addresses: the caller must keep them alive.
    """

    def __init__(self, tensors: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> None:
        self._count = len(tensors)
        on_gpu = _select_gpu_tensors(tensors) if all(tensor.is_contiguous() for tensor in tensors) else []
        self._launches = _build_launches(
            [tensors[i] for i in on_gpu], None if into is None else [into[i] for i in on_gpu]
        )
        self._gpu_indices = np.array(on_gpu, np.int64)
        self._other_indices = sorted(set(range(len(tensors))).difference(on_gpu))
        self._tensors = [tensors[i] for i in self._other_indices]
        self._into = None if into is None else [into[i] for i in self._other_indices]
        self._pending: list[tuple[Array, Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        self._other_checksums: list[Checksum] = []

    def start(self) -> None:
        """Start computing; does not wait for GPU tensors."""
        self._pending = [(indices, launch.copy_to_host()) for indices, launch in self._launches]
        self._events = []
        for device in {launch.device for _, launch in self._launches if launch.device.type == "cuda"}:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(device))
        self._other_checksums = compute_checksums(self._tensors, self._into)

    def read(self) -> Array:
        """``plain`` and ``placed`` of each, [N, 2] of 64 bits, when the started computation is done."""
        for event in self._events:
            event.synchronize()
        checksums_N2 = np.zeros((self._count, 2), np.uint64)
        for indices, pairs in self._pending:
            checksums_N2[self._gpu_indices[indices]] = pairs.numpy().view(np.uint64)
        if self._other_indices:
            checksums_N2[self._other_indices] = np.array(self._other_checksums, np.uint64)
        return checksums_N2


def _select_gpu_tensors(tensors: Sequence[Tensor]) -> list[int]:
    """Indices of the tensors that the Triton kernel computes."""
    return [
        i
        for i, tensor in enumerate(tensors)
        if tensor.is_cuda and HAVE_TRITON and tensor.element_size() < 8 and tensor.numel()
    ]


def _view_bits(tensor: Tensor) -> Tensor:
    flat_N = tensor.detach().contiguous().view(-1)
    return flat_N.view(_BITS[flat_N.element_size()])


# -- CPU --------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _weights(columns: int) -> Array:
    """One column of ones, one of indices."""
    return np.stack((np.ones(columns), np.arange(1.0, columns + 1)), axis=1)


@lru_cache(maxsize=1)
def _index_weights(count: int) -> Array:
    return np.arange(1, count + 1, dtype=np.int64)


def _checksum_cpu(bits_N: Tensor, block_GC: Array) -> Checksum:
    """In float64, which is exact: 16 bits of an element times 12 of its column, 4,096 times, are less than 53."""
    numbers_N = bits_N.numpy()
    if len(numbers_N) <= _MAX_UNBLOCKED:  # in the cache, integers are faster than blocks of floats
        wide_N = numbers_N.astype(np.int64)
        return int(wide_N.sum()), int(np.dot(wide_N, _index_weights(_MAX_UNBLOCKED)[: len(wide_N)]))
    if numbers_N.itemsize < 4:
        return _checksum_blocks(numbers_N, block_GC)
    low, high = (_checksum_blocks(numbers_N, block_GC, half) for half in ("low", "high"))
    return low[0] + (high[0] << 16), low[1] + (high[1] << 16)


def _checksum_blocks(numbers_N: Array, block_GC: Array, half: str = "") -> Checksum:
    rows, columns = block_GC.shape
    plain = placed = 0
    weights_C2 = _weights(columns)
    step = rows * columns
    for start in range(0, len(numbers_N), step):
        block_N = numbers_N[start : start + step]
        if half:
            block_N = block_N & 0xFFFF if half == "low" else block_N >> 16
        used = -(-len(block_N) // columns)
        flat_N = block_GC[:used].reshape(-1)
        flat_N[: len(block_N)] = block_N
        flat_N[len(block_N) :] = 0
        sums_G2 = np.matmul(block_GC[:used], weights_C2).astype(np.int64)
        rows_G = sums_G2[:, 0]
        block_sum = int(rows_G.sum())
        plain += block_sum
        placed += int(sums_G2[:, 1].sum()) + int((rows_G * np.arange(used)).sum()) * columns + start * block_sum
    return plain, placed


def _checksum_torch(bits_N: Tensor) -> Checksum:
    plain = torch.zeros((), dtype=torch.int64, device=bits_N.device)
    placed = torch.zeros((), dtype=torch.int64, device=bits_N.device)
    for start in range(0, bits_N.numel(), _CHUNK):
        chunk_N = bits_N[start : start + _CHUNK].to(torch.int64)
        plain += chunk_N.sum()
        placed += (chunk_N * torch.arange(start + 1, start + 1 + chunk_N.numel(), device=bits_N.device)).sum()
    return int(plain), int(placed)


# -- Triton -----------------------------------------------------------------------------------


@jit
def _checksum_kernel(
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
    remaining = tl.load(table_ptr + row * 4 + 2) - first
    source = tl.load(table_ptr + row * 4).to(tl.pointer_type(BITS)) + first  # pyright: ignore[reportArgumentType]
    target = tl.load(table_ptr + row * 4 + 3).to(tl.pointer_type(BITS)) + first  # pyright: ignore[reportArgumentType]
    lane_L = tl.arange(0, L)
    plain_L = tl.zeros((L,), WIDE)
    stepped_L = tl.zeros((L,), WIDE)
    if remaining >= L * STEPS:  # without a mask, loads are vectorized
        for step in range(0, STEPS, 4):
            from_L = source + step * L + lane_L
            to_L = target + step * L + lane_L
            if ALIGNED:
                from_L = tl.max_contiguous(tl.multiple_of(from_L, 16), L)
                to_L = tl.max_contiguous(tl.multiple_of(to_L, 16), L)
            # All four loads are issued before the first store, past which the compiler moves no load.
            a_L, b_L, c_L, d_L = tl.load(from_L), tl.load(from_L + L), tl.load(from_L + 2 * L), tl.load(from_L + 3 * L)
            if COPY:
                tl.store(to_L, a_L)
                tl.store(to_L + L, b_L)
                tl.store(to_L + 2 * L, c_L)
                tl.store(to_L + 3 * L, d_L)
            c_wide_L, d_wide_L = c_L.to(WIDE), d_L.to(WIDE)
            high_L = c_wide_L + d_wide_L
            sum_L = a_L.to(WIDE) + b_L.to(WIDE) + high_L
            plain_L += sum_L
            stepped_L += sum_L * step + b_L.to(WIDE) + high_L * 2 + d_wide_L
    else:
        for step in range(STEPS):
            valid_L = step * L + lane_L < remaining
            bits_L = tl.load(source + step * L + lane_L, mask=valid_L, other=0)
            if COPY:
                tl.store(target + step * L + lane_L, bits_L, mask=valid_L)
            plain_L += bits_L.to(WIDE)
            stepped_L += bits_L.to(WIDE) * step
    wide_L = plain_L.to(tl.int64)
    plain = tl.sum(wide_L)
    placed = plain * (first + 1) + tl.sum(stepped_L.to(tl.int64)) * L + tl.sum(wide_L * lane_L)
    tl.atomic_add(out_ptr + row * 2, plain)
    tl.atomic_add(out_ptr + row * 2 + 1, placed)


class _Launch:
    """One launch over tensors of one device, element size and alignment; its metadata is on the device."""

    def __init__(
        self, flat: Sequence[Tensor], targets: Sequence[Tensor] | None, device: torch.device, size: int, aligned: bool
    ) -> None:
        counts = np.array([tensor.numel() for tensor in flat], np.int64)
        tiles = -(-counts // (_LANES * _STEPS))
        sources = np.array([tensor.data_ptr() for tensor in flat], np.int64)
        destinations = sources if targets is None else np.array([tensor.data_ptr() for tensor in targets], np.int64)
        table = np.stack((sources, np.cumsum(tiles) - tiles, counts, destinations), axis=1)
        self.device = device
        self._rows_T = torch.from_numpy(np.repeat(np.arange(len(flat), dtype=np.int32), tiles)).to(device)
        self._table = torch.from_numpy(table).to(device)
        self._size = size
        self._copies = targets is not None
        self._aligned = aligned
        self._out = torch.zeros((len(flat), 2), dtype=torch.int64, device=device)
        self._host = torch.empty(self._out.shape, dtype=torch.int64, pin_memory=self._out.is_cuda)

    def copy_to_host(self) -> Tensor:
        """The checksums, in pinned host memory once the copy is done; overwritten by the next call."""
        return self._host.copy_(self(), non_blocking=True)

    def __call__(self) -> Tensor:
        """The checksums, computed asynchronously."""
        out = self._out.zero_()
        bits = {1: tl.int8, 2: tl.int16, 4: tl.int32}[self._size]
        with torch.cuda.device(self.device) if self.device.type == "cuda" else torch.no_grad():
            _checksum_kernel[(len(self._rows_T),)](
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


def _build_launches(flat: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[tuple[Array, _Launch]]:
    """One launch per device, element size and alignment, and the indices of its tensors."""
    groups: dict[tuple[torch.device, int, bool], list[int]] = {}
    for i, tensor in enumerate(flat):
        aligned = tensor.data_ptr() % 16 == 0 and (targets is None or targets[i].data_ptr() % 16 == 0)
        groups.setdefault((tensor.device, tensor.element_size(), aligned), []).append(i)
    return [
        (
            np.array(indices),
            _Launch([flat[i] for i in indices], None if targets is None else [targets[i] for i in indices], *group),
        )
        for group, indices in groups.items()
    ]


def _checksum_gpu(flat: Sequence[Tensor], targets: Sequence[Tensor] | None) -> list[Checksum]:
    checksums: list[Checksum] = [(0, 0)] * len(flat)
    for indices, launch in _build_launches(flat, targets):
        for i, (plain, placed) in zip(indices.tolist(), launch().tolist(), strict=True):
            checksums[i] = (plain, placed)
    return checksums
