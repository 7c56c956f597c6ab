"""Start of the process that compiles a run's Triton kernels while the run imports, reads and loads."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import miles
from miles.launch.config import Config
from miles.launch.plan.topology import is_distributed, is_remote

_GPU = Path("/dev/nvidiactl")
# With fewer cores, compiling beside the run would slow down the run.
_MIN_CORES = 8


class Precompilation:
    """The process; it is ready when the kernels of the first step are in Triton's cache, or when it has ended."""

    def __init__(self, argv: Sequence[str], done: Path) -> None:
        done.parent.mkdir(parents=True, exist_ok=True)
        self._done = done
        self._ready = threading.Event()
        with done.with_suffix(".log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "miles.launch.precompile.kernels", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until it is ready; false if it is not after ``seconds``."""
        return self._ready.wait(seconds)

    def _watch(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if line.strip() == "ready":
                    self._ready.set()
        self._ready.set()
        if self._process.wait() == 0:
            self._done.touch()


def start_precompilation(argv: Sequence[str], config: Config) -> Precompilation | None:
    """Start to compile the kernels of a training command; None where it does not help, or has been done before.

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
        return Precompilation(argv, done)
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
    parts = (model, config.native, config.models, batch, versions, miles.__version__, str(sources), newest)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return _find_cache() / "miles" / f"{key}.done"


def _find_cache() -> Path:
    """Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
