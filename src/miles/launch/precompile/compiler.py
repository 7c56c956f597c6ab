"""Parallel Triton compilation into Triton's cache: a process for each kernel that is launched on a fake GPU.

The process that launches has never used CUDA, so that it can be forked; what its children compile and link, other
processes find in the cache.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NoReturn

from miles.kernels.runtime.fake_gpu import FakeDriver, Target
from miles.rollout.sandbox.libc import PR_SET_PDEATHSIG, prctl


class ParallelCompiler:
    """Compiles every kernel that this process launches once, with up to ``workers`` at the same time."""

    def __init__(self, target: Target, *, workers: int) -> None:
        self._target = FakeDriver(target).get_current_target()
        self._workers = workers
        self.children: set[int] = set()
        self.started, self.failed = 0, 0

    def install(self) -> None:
        """Compile instead of launching from now on, in this process."""
        from triton.runtime.jit import JITFunction

        kernels: Any = JITFunction
        launch: Any = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return launch(function, *args, grid=grid, warmup=True, **options)

        def compile_kernel(
            function: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any, warmup: bool
        ) -> object:
            source = function.ASTSource(function, signature, constants, attrs)
            function.device_caches[device][0][key] = source  # not launched, and not compiled again
            self._fork(lambda: self._compile(source, options))
            return source

        kernels.run = run
        kernels._do_compile = compile_kernel

    def link_driver(self) -> None:
        """Compile and link the module with which Triton calls the driver."""

        def link() -> None:
            from triton.backends.nvidia.driver import CudaUtils

            with suppress(AssertionError):  # there is no driver to link with
                CudaUtils()

        if self._target.backend == "cuda":
            self._fork(link)

    def wait(self, children: Collection[int] | None = None) -> None:
        """Wait until what these ``children`` compile is compiled; None: everything."""
        while self.children if children is None else self.children.intersection(children):
            self._wait_for_one()

    def _compile(self, source: Any, options: Any) -> None:
        from triton.compiler import compile as compile_triton

        kernel = compile_triton(source, target=self._target, options=options.__dict__)
        if self._target.backend == "cuda":
            from triton.backends.nvidia.driver import CudaLauncher

            with suppress(AssertionError):  # there is no driver to link the launcher of this signature with
                CudaLauncher(source, kernel.metadata)

    def _fork(self, work: Callable[[], None]) -> None:
        while len(self.children) >= self._workers:
            self._wait_for_one()
        self.started += 1
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _run_and_exit(work, parent)
        self.children.add(child)

    def _wait_for_one(self) -> None:
        child, status = os.wait()
        self.children.discard(child)
        self.failed += status != 0


def end_with_parent(parent: int) -> None:
    """End this process, which ``parent`` forked, when that ends, however it does."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _run_and_exit(work: Callable[[], None], parent: int) -> NoReturn:
    """Run ``work`` in a process forked by ``parent``, and end it without what its parent would do at its end."""
    status = 1
    try:
        end_with_parent(parent)
        work()
        status = 0
    except BaseException:  # the kernel is compiled when it is launched, and its error is shown there
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
