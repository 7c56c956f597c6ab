"""Processes that tests borrow to be ranks: started once, joined anew in a gloo group of their own for each call."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

_PATIENCE = timedelta(seconds=180)
PRELOADED = ["tests.launch.small_run", "tests.models.kinds.small"]
"""What takes seconds to import, and is imported once, by the process that all ranks and commands are forked from."""
_pool: list[tuple[BaseProcess, Connection]] = []


def ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(rank, world, *args)`` gives on each of ``world`` ranks, in order.

    It must be a module's own function; its arguments and results travel between processes. A rank that fails fails the
    test with its own traceback.
    """
    _start(world)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            _pool[rank][1].send((function, rank, world, str(Path(folder, "store")), args))
        results: dict[int, Any] = {}
        while len(results) < world:
            waiting = {_pool[rank][1]: rank for rank in range(world) if rank not in results}
            for pipe in wait(list(waiting)):
                rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
                good, results[rank] = _heard(rank)
                if not good:
                    _end()  # those that still wait for it are of no more use
                    raise AssertionError(f"a rank failed:\n{results[rank]}")
    return [results[rank] for rank in range(world)]


def _heard(rank: int) -> tuple[bool, Any]:
    try:
        return _pool[rank][1].recv()
    except (EOFError, ConnectionError):
        return False, f"rank {rank} died with exit code {_pool[rank][0].exitcode}"


def _start(world: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    while len(_pool) < world:
        near, far = context.Pipe()
        process = context.Process(target=_serve, args=(far,), daemon=True)
        process.start()
        far.close()
        _pool.append((process, near))  # pyright: ignore[reportArgumentType]


@atexit.register
def _end() -> None:
    for process, pipe in _pool:
        pipe.close()
        process.kill()
        process.join()
    _pool.clear()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            function, rank, world, store, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_PATIENCE
            )
            answer = True, function(rank, world, *args)
        except BaseException:
            answer = False, f"rank {rank}:\n{traceback.format_exc()}"
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
