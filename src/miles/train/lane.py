"""Work that comes in from the host and goes back to it, piece by piece, while the device computes on another.

    copy in     1  2  3  4
    compute        1  2  3  4
    copy out          1  2  3  4

On a device that is the host, or where nothing is to be fetched, pieces are done one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Pieces whose copies on the device exist at one time.
_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``work`` on the copies of ``held`` tensors, in order; what it writes into them goes back to where they live."""

    held: tuple[Tensor, ...]
    work: Callable[[tuple[Tensor, ...]], None]


@torch.no_grad()
def run(jobs: Iterable[Job], device: torch.device) -> None:
    """Do every job on ``device``, in order; tensors that are there already are worked on in place."""
    if device.type != "cuda":
        for job in jobs:
            copies = _fetched(job, device)
            job.work(copies)
            _returned(job, copies)
        return
    _streamed(jobs, device)


def _streamed(jobs: Iterable[Job], device: torch.device) -> None:
    here, inward, outward = torch.cuda.current_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    flying: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
    for job in jobs:
        while len(flying) >= _DEPTH:
            # Copies are let go only when all streams are done with them: the allocator need not know of the others.
            flying.popleft()[0].synchronize()
        with torch.cuda.stream(inward):
            copies = _fetched(job, device)
        here.wait_event(_mark(inward))
        job.work(copies)
        outward.wait_event(_mark(here))
        with torch.cuda.stream(outward):
            _returned(job, copies)
        flying.append((_mark(outward), copies))
    outward.synchronize()
    here.wait_stream(outward)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _fetched(job: Job, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(t.to(device, non_blocking=True) for t in job.held)


def _returned(job: Job, copies: tuple[Tensor, ...]) -> None:
    for home, copy in zip(job.held, copies, strict=True):
        if home is not copy:
            home.copy_(copy, non_blocking=True)
