"""Host memory that tensors are copied into on their way to disk: blocks of one size, used again and again."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

import torch
from torch import Tensor

from miles.models import saving

BLOCK = 16 << 20
"""Bytes of a block."""

BOUND = 16
"""Blocks there are at most when whoever saves waits for the files anyway."""


class Blocks:
    """Blocks that go out full and come back empty; pinned ones are for tensors of a CUDA device.

    They stay until the program ends: a next save finds the memory of this one.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.made = 0
        self._pinned = pinned
        self._free: list[Tensor] = []
        self._change = Condition()

    def take(self, most: int | None) -> Tensor:
        """An empty block; once ``most`` of them exist, the first that comes back."""
        with self._change:
            while not self._free and most is not None and self.made >= most:
                self._change.wait()
            if self._free:
                return self._free.pop()
            self.made += 1
        return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, block: Tensor) -> None:
        """A block is empty again."""
        with self._change:
            self._free.append(block)
            self._change.notify()


class Filler:
    """Bytes and tensors in, full blocks out: ``hand`` is given each, and how many of its bytes count.

    What it was given may change as soon as a call returns, for work on the same stream, and for everyone once
    ``flush`` has returned.
    """

    def __init__(self, blocks: Blocks, hand: Callable[[Tensor, int], None], *, most: int | None) -> None:
        self._blocks, self._hand, self._most = blocks, hand, most
        self._block: Tensor | None = None
        self._used = 0
        self._stream: torch.cuda.Stream | None = None

    def raw(self, data: bytes) -> None:
        self._fill(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def tensor(self, tensor: Tensor) -> None:
        """The values of ``tensor`` in order, however it lies in memory."""
        rows = tensor.detach()
        for part in saving.parts(rows if rows.dim() else rows.view(1)):
            self._fill(part.contiguous().view(-1).view(torch.uint8))

    def flush(self) -> None:
        """Hand on what there is."""
        if self._block is None:
            return
        if self._stream is not None:  # the device may still be writing into the block
            self._stream.synchronize()
            self._stream = None
        block, self._block = self._block, None
        self._hand(block, self._used)

    def _fill(self, data: Tensor) -> None:
        done = 0
        while done < len(data):
            if self._block is None:
                self._block, self._used = self._blocks.take(self._most), 0
            count = min(len(data) - done, BLOCK - self._used)
            self._block[self._used : self._used + count].copy_(data[done : done + count], non_blocking=True)
            if data.device.type == "cuda":
                self._stream = torch.cuda.current_stream(data.device)
            self._used += count
            done += count
            if self._used == BLOCK:
                self.flush()
