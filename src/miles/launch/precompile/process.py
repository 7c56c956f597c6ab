"""Start of the process that compiles a run's Triton kernels while the run reads and loads."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import miles
from miles.launch.config import Config
from miles.launch.plan.topology import is_distributed, is_remote

_GPU = Path("/dev/nvidiactl")
# With fewer cores, compiling beside the run would slow down the run.
_MIN_CORES = 8


class Precompilation:
    """A fork of this process that compiles the kernels of ``config``.

    It is ready when those of the first rollout are in Triton's cache, or when it has ended. ``done`` is written when
    all are there, and what went wrong to a log beside it. This process must not have used CUDA yet.
    """

    def __init__(self, config: Config, done: Path) -> None:
        done.parent.mkdir(parents=True, exist_ok=True)
        self._done = done
        self._ready = threading.Event()
        self._output, output = os.pipe()
        log = os.open(done.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            _compile_and_exit(config, output, log, parent)
        os.close(output)
        os.close(log)
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until it is ready; false if it is not after ``seconds``."""
        return self._ready.wait(seconds)

    def _watch(self) -> None:
        with os.fdopen(self._output, "rb") as output:
            if output.read(1):
                self._ready.set()
            output.read()  # until it ends
        self._ready.set()
        with suppress(OSError):
            _, status = os.waitpid(self._child, 0)
            if status == 0:
                self._done.touch()


def _compile_and_exit(config: Config, output: int, log: int, parent: int) -> NoReturn:
    """Compile the kernels of a run in a process forked by it, which ends with it at the latest, without what it would
    do at its end.
    """
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        from miles.launch.precompile.compiler import end_with_parent
        from miles.launch.precompile.kernels import compile_run

        end_with_parent(parent)
        status = 0 if compile_run(config, lambda: os.write(output, b".")) else 1
    except BaseException as error:  # the run compiles its kernels itself
        os.write(log, f"{type(error).__name__}: {error}\n".encode())
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def start_precompilation(config: Config) -> Precompilation | None:
    """Start to compile the kernels of a training run; None where it does not help, or has been done before.

    It helps a run in one process on an NVIDIA GPU whose kernels are not in Triton's cache.
    """
    if not _GPU.exists() or len(os.sched_getaffinity(0)) < _MIN_CORES:
        return None
    in_one_process = not is_remote(config) and not is_distributed(config)
    if config.cluster.device not in ("auto", "cuda", "cuda:0") or not in_one_process:
        return None
    done = find_marker(config)
    if done is None or done.exists():
        return None
    try:
        return Precompilation(config, done)
    except OSError:  # as for a cache that cannot be written: the run compiles its kernels itself
        return None


def find_marker(config: Config) -> Path | None:
    """The file in Triton's cache that says that the kernels of such a run are there; None without a model folder."""
    try:
        model = (Path(config.models.hf_checkpoint or "") / "config.json").read_bytes()
        versions = [version(name) for name in ("torch", "triton")]
    except (OSError, PackageNotFoundError):
        return None
    sources = Path(miles.__file__).parent
    newest = max(path.stat().st_mtime_ns for path in sources.glob("kernels/**/*.py"))
    batch = config.rollout.rollout_temperature, config.train.log_probs_chunk_size
    options = config.native, replace(config.models, hf_checkpoint=None)
    parts = (model, options, batch, versions, miles.__version__, str(sources), newest)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return _find_cache() / "miles" / f"{key}.done"


def _find_cache() -> Path:
    """Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
