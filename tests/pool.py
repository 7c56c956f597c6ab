"""Process pool for distributed tests: processes are started once, and form a new gloo process group in each call."""

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

_TIMEOUT = timedelta(seconds=180)
PRELOADED = ["tests.launch.small_run", "tests.models.small_families.small", "tests.launch.preloaded"]
"""Slow imports, done once in the fork server of all ranks and commands."""
_pool: list[tuple[BaseProcess, Connection]] = []


def ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of ``function(rank, world, *args)`` on each of ``world`` ranks, in order.

    The function must be defined in a module; its arguments and results are pickled. A rank that fails fails the test
    with its traceback.
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
                succeeded, results[rank] = _receive(rank)
                if not succeeded:
                    _kill_all()  # the others may wait for it for ever
                    raise AssertionError(f"a rank failed:\n{results[rank]}")
    return [results[rank] for rank in range(world)]


def _receive(rank: int) -> tuple[bool, Any]:
    try:
        return _pool[rank][1].recv()
    except (EOFError, ConnectionError):
        return False, f"rank {rank} died with exit code {_pool[rank][0].exitcode}"


def _start(world: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    while len(_pool) < world:
        pipe, child_end = context.Pipe()
        process = context.Process(target=_serve, args=(child_end,), daemon=True)
        process.start()
        child_end.close()
        _pool.append((process, pipe))  # pyright: ignore[reportArgumentType]


@atexit.register
def _kill_all() -> None:
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
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_TIMEOUT
            )
            result = True, function(rank, world, *args)
        except BaseException:
            result = False, f"rank {rank}:\n{traceback.format_exc()}"
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(result)
