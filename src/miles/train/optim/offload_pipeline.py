"""Pipeline of host-to-device copy, compute, and device-to-host copy for offloaded optimizer state.

    copy in     1  2  3  4
    compute        1  2  3  4
    copy out          1  2  3  4

On the CPU, jobs run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Jobs whose device copies exist at one time.
_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadJob:
    """``work`` on device copies of ``tensors``; changes are written back."""

    tensors: tuple[Tensor, ...]
    work: Callable[[tuple[Tensor, ...]], None]


@torch.no_grad()
def run(jobs: Iterable[OffloadJob], device: torch.device) -> None:
    """Run all jobs on ``device``, in order; tensors already there are updated in place."""
    if device.type != "cuda":
        for job in jobs:
            copies = _copy_in(job, device)
            job.work(copies)
            _copy_out(job, copies)
        return
    _run_pipelined(jobs, device)


def _run_pipelined(jobs: Iterable[OffloadJob], device: torch.device) -> None:
    compute = torch.cuda.current_stream(device)
    h2d, d2h = torch.cuda.Stream(device), torch.cuda.Stream(device)
    in_flight: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
    for job in jobs:
        while len(in_flight) >= _DEPTH:
            # Copies are freed only when all streams are done with them, so the allocator needs no stream tracking.
            in_flight.popleft()[0].synchronize()
        with torch.cuda.stream(h2d):
            copies = _copy_in(job, device)
        compute.wait_event(_record_event(h2d))
        job.work(copies)
        d2h.wait_event(_record_event(compute))
        with torch.cuda.stream(d2h):
            _copy_out(job, copies)
        in_flight.append((_record_event(d2h), copies))
    d2h.synchronize()
    compute.wait_stream(d2h)


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _copy_in(job: OffloadJob, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(t.to(device, non_blocking=True) for t in job.tensors)


def _copy_out(job: OffloadJob, copies: tuple[Tensor, ...]) -> None:
    for original, copy in zip(job.tensors, copies, strict=True):
        if original is not copy:
            original.copy_(copy, non_blocking=True)
