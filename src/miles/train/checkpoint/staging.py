"""Staging buffers for checkpoints: a pool of (pinned) host blocks that tensors are copied into before writing."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

import torch
from torch import Tensor

from miles.models.checkpoint import save

BLOCK_BYTES = 16 << 20
"""Size of a block."""

MAX_BLOCKS = 16
"""Maximum number of blocks if the save waits for the files anyway."""


class StagingPool:
    """A pool of blocks, pinned for tensors of a CUDA device.

    Blocks are kept for later saves.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.allocated = 0
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._change = Condition()

    def take(self, limit: int | None) -> Tensor:
        """Return an empty block; once ``limit`` blocks exist, wait for one to be returned."""
        with self._change:
            while not self._free and limit is not None and self.allocated >= limit:
                self._change.wait()
            if self._free:
                return self._free.pop()
            self.allocated += 1
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)

    def put_back(self, block: Tensor) -> None:
        """Return a block to the pool."""
        with self._change:
            self._free.append(block)
            self._change.notify()


class StagingWriter:
    """Copies bytes and tensors into blocks, and passes each full block with its size to ``on_block``.

    Inputs may change as soon as a call returns (for work on the same stream), and for any stream once
    ``flush`` has returned.
    """

    def __init__(self, pool: StagingPool, on_block: Callable[[Tensor, int], None], *, limit: int | None) -> None:
        self._pool = pool
        self._on_block = on_block
        self._limit = limit
        self._block: Tensor | None = None
        self._used = 0
        self._stream: torch.cuda.Stream | None = None

    def write_bytes(self, data: bytes) -> None:
        self._fill(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def write_tensor(self, tensor: Tensor) -> None:
        """Write the values of ``tensor`` in order, whatever its strides."""
        rows = tensor.detach()
        for part in save.split_for_copy(rows if rows.dim() else rows.view(1)):
            self._fill(part.contiguous().view(-1).view(torch.uint8))

    def flush(self) -> None:
        """Pass on the current block."""
        if self._block is None:
            return
        if self._stream is not None:  # the device may still be writing into the block
            self._stream.synchronize()
            self._stream = None
        block, self._block = self._block, None
        self._on_block(block, self._used)

    def _fill(self, data: Tensor) -> None:
        done = 0
        while done < len(data):
            if self._block is None:
                self._block, self._used = self._pool.take(self._limit), 0
            count = min(len(data) - done, BLOCK_BYTES - self._used)
            self._block[self._used : self._used + count].copy_(data[done : done + count], non_blocking=True)
            if data.device.type == "cuda":
                self._stream = torch.cuda.current_stream(data.device)
            self._used += count
            done += count
            if self._used == BLOCK_BYTES:
                self.flush()
