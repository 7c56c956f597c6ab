"""``--max-restarts``: a small parent that starts a run again when it crashed, was killed, or shows no sign of life.

    parent: start the run -> wait, look at its pulse -> why did it end? -> pause -> start it again -> ...
    run:    beat, and end when the parent is gone

The same command continues a run, so that starting it again is all there is to do. What would end the same way again is
not retried: bad input, a directory that cannot be continued, and whatever the user asked to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from miles.cluster.pulse import Pulse, beat, interval
from miles.core.errors import DataError, MilesError, ParityError, PlugError, ResumeError, UsageError

PULSE = "MILES_SUPERVISED"
"""Names the file a supervised run beats in."""
PATIENCE = "MILES_SUPERVISED_PATIENCE"

# How a supervised run tells its parent that another try would end the same way.
HOPELESS = 78
_SAME_AGAIN = (UsageError, ResumeError, DataError, PlugError, ParityError)
_ENDED = (0, 2, 130, 128 + signal.SIGTERM)
_LONGEST_PAUSE = 60.0
_LOOK = 1.0


def supervised() -> bool:
    """Is this process a run that another one starts again?"""
    return PULSE in os.environ


def code_of(error: MilesError) -> int:
    """The exit code of a run that ended with ``error``."""
    return HOPELESS if supervised() and isinstance(error, _SAME_AGAIN) else 1


def show_life() -> None:
    """In a supervised run: beat, and stop as if asked to when the parent is gone."""
    if not supervised():
        return
    parent = os.getppid()
    told: list[int] = []

    def look() -> None:
        if os.getppid() != parent and not told:
            told.append(parent)
            os.kill(os.getpid(), signal.SIGTERM)

    beat(Path(os.environ[PULSE]), float(os.environ[PATIENCE]) or _LOOK, look)


class Supervisor:
    """Runs ``words`` until they end for good.

    ``most`` is how often they are started again without a new checkpoint in ``directory``, ``patience`` for how many
    seconds they may show no sign of life, for ever when 0. The first pause is ``backoff`` long, each further one twice
    the one before.
    """

    def __init__(
        self, words: Sequence[str], directory: Path, *, most: int, patience: float, backoff: float = 1.0
    ) -> None:
        self._words, self._directory = list(words), directory
        self._most, self._patience, self._backoff = most, patience, backoff
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped: int | None = None

    def run(self) -> int:
        """The exit code of the last life."""
        newest, times = self._newest(), 0
        with self._signals():
            while True:
                code, why = self._life()
                if code == HOPELESS:
                    return 1
                if code in _ENDED or self._stopped is not None:
                    return code
                now = self._newest()
                times, newest = times + 1 if now == newest else 1, now
                if times > self._most:
                    since = f"step {newest}" if newest else "its start"
                    _say(
                        f"the run {why}; it is given up after {self._most} restarts that brought no checkpoint after "
                        f"{since} (--max-restarts); the same command goes on from there when the cause is mended."
                    )
                    return code
                pause = min(_LONGEST_PAUSE, self._backoff * 2 ** (times - 1))
                count = f"{times} of at most {self._most} times without a new checkpoint"
                _say(f"the run {why}; it is started again in {pause:g} s ({count}).")
                self._wait(pause)
                if self._stopped is not None:
                    return 130

    def _life(self) -> tuple[int, str]:
        """One life of the run: its exit code, and how it ended in words."""
        with tempfile.TemporaryDirectory(prefix="miles-pulse-") as folder:
            pulse = Path(folder) / "beat"
            around = {PULSE: str(pulse), PATIENCE: str(self._patience)}
            # A terminal's Ctrl-C is the parent's to give on, once.
            self._child = child = subprocess.Popen(self._words, env={**os.environ, **around}, start_new_session=True)
            frozen = self._watch(child, Pulse(pulse, self._patience or _LOOK))
            code = child.wait()
            with suppress(ProcessLookupError):  # what it left behind, such as a rank that is frozen
                os.killpg(child.pid, signal.SIGKILL)
            self._child = None
        if frozen:
            return (
                128 + signal.SIGKILL,
                f"gave no sign of life for {self._patience:g} s (--heartbeat-timeout) and was ended",
            )
        if code >= 0:
            return code, f"ended with exit code {code}"
        more = " (which is how the kernel ends what takes too much memory)" if code == -signal.SIGKILL else ""
        return 128 - code, f"was ended by {signal.Signals(-code).name}{more}"

    def _watch(self, child: subprocess.Popen[bytes], pulse: Pulse) -> bool:
        """Return when it has ended; true when it had to be ended, for it was frozen."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                child.wait(interval(self._patience) if self._patience else _LOOK)
                return False
            if self._patience and not pulse.look():
                child.kill()
                return True

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._stopped is None and time.monotonic() < deadline:
            time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))

    def _newest(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        names = (path.name.removeprefix("step-") for path in self._directory.glob("checkpoints/step-*"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are given on to the run, which is then not started again."""

        def give_on(number: int, frame: FrameType | None) -> None:
            self._stopped = number
            if self._child is not None:
                self._child.send_signal(number)

        before = {number: signal.signal(number, give_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def supervise(argv: Sequence[str], directory: Path, *, most: int, patience: float) -> int:
    """``miles train`` with these words under a parent; the exit code of its last life."""
    words = [sys.executable, "-m", "miles.launch.main", "train", *argv]
    return Supervisor(words, directory, most=most, patience=patience).run()


def _say(sentence: str) -> None:
    print(f"miles: {sentence}", file=sys.stderr, flush=True)
