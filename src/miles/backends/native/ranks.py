"""The processes that share a model with the engine's own: started, spoken to, watched, and ended.

Rank 0 is the engine's process and leads; every other rank is a process of its own, joined to it by a pipe (messages)
and by the ring (tensors). A follower does what its pipe says, in order, and ends when the pipe does: none outlives the
engine, however that ends. Who waits for whom: a follower for its pipe, without a deadline; the leader for replies, and
everyone for everyone in the ring, each with one.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

from miles.backends.native.parcel import pack, unpack
from miles.backends.native.ring import RingError
from miles.core.errors import EngineError

# How processes are started: a fork would take over a device that is in use.
START: Literal["spawn", "forkserver"] = "spawn"

# How a follower ends that lost the others: whoever ended otherwise is the cause.
LOST = 75

# Seconds a process is given to end by itself, or to say why it did.
_GRACE = 5.0

Follow = Callable[["Place", Connection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place among ``world``: its device, and where the ranks meet. ``apart``: no two share a device."""

    engine: str
    rank: int
    world: int
    device: str
    apart: bool
    folder: Path
    patience: float


def serve(follow: Follow, place: Place, pipe: Connection) -> None:
    """The life of a follower's process."""
    # Ctrl-C reaches the whole group of processes; it is the leader's to answer.
    for told in (signal.SIGINT, signal.SIGTERM):  # sent to all of a group, but the leader's to act on
        signal.signal(told, signal.SIG_IGN)
    try:
        follow(place, pipe)
    except (EOFError, ConnectionError):  # the leader is gone, and could not clear up
        rmtree(place.folder, ignore_errors=True)
        sys.exit(0)
    except RingError:
        sys.exit(LOST)
    except Exception as error:
        pipe.send_bytes(pack("failed", said(error)))
        sys.exit(1)


def said(error: Exception) -> str:
    """An error in a line: libraries go on for more."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Ranks:
    """The followers of one engine.

    Once there is a ``fault``, a sentence, they are gone, and whatever is asked of them is answered by it.
    """

    def __init__(self, engine: str, devices: Sequence[str], follow: Follow, *, apart: bool, patience: float) -> None:
        self.engine = engine
        self.world = len(devices)
        self.patience = patience
        self.fault = ""
        # Messages and the tensors that belong to them go out together.
        self.turn = threading.RLock()
        self._folder = TemporaryDirectory(prefix="miles-ranks-")
        self.place = Place(
            engine=engine,
            rank=0,
            world=self.world,
            device=devices[0],
            apart=apart,
            folder=Path(self._folder.name),
            patience=patience,
        )
        self._closing = False
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = cast(SpawnContext, multiprocessing.get_context(START))
        for rank in range(1, self.world):
            pipe, far = cast("tuple[Connection, Connection]", Pipe())
            place = replace(self.place, rank=rank, device=devices[rank])
            process = context.Process(
                target=serve, args=(follow, place, far), name=f"{engine} rank {rank}", daemon=True
            )
            self._pipes.append(pipe)
            self._processes.append(process)
            process.start()
            far.close()

    # -- speaking ---------------------------------------------------------------------------

    def tell(self, verb: str, content: Any = None) -> None:
        """Send everyone a message; they get to it after what they were told before."""
        message = pack(verb, content)
        with self.turn:
            self.check()
            try:
                for pipe in self._pipes:
                    pipe.send_bytes(message)
            except OSError as error:
                raise self.lose(error=error) from error

    def replies(self) -> list[Any]:
        """What each says to the last message, in order of rank."""
        self.check()
        deadline = time.monotonic() + self.patience
        out: list[Any] = []
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), 1):
            wait((pipe, process.sentinel), max(0.0, deadline - time.monotonic()))
            if not pipe.poll():
                late = f"rank {rank} of {self.world} did not answer within {self.patience:g} s"
                raise self.lose(late if process.is_alive() else None)
            try:
                verb, content = unpack(pipe.recv_bytes())
            except (EOFError, OSError) as error:
                raise self.lose(error=error) from error
            if verb == "failed":
                raise self.lose(f"rank {rank} of {self.world} failed: {content}")
            out.append(content)
        return out

    def check(self) -> None:
        """Raise the fault if there is one, which may be found here."""
        if not self.fault and not all(process.is_alive() for process in self._processes):
            self.lose()
        if self.fault:
            raise EngineError(self.fault)

    # -- ending -----------------------------------------------------------------------------

    def watch(self, lost: Callable[[], None]) -> None:
        """Call ``lost``, from another thread, as soon as a follower ends that was not told to."""
        sentinels = [process.sentinel for process in self._processes]

        def look() -> None:
            wait(sentinels)
            if not self._closing:
                lost()

        threading.Thread(target=look, name=f"{self.engine} watch", daemon=True).start()

    def lose(self, cause: str | None = None, *, error: Exception | None = None) -> EngineError:
        """Give up: find out what happened (unless told), end all, and say it in one sentence.

        ``error`` is what showed that something did.
        """
        with self.turn:
            if not self.fault:
                self.fault = f"{self.engine} had to close, because {cause or self._cause(error)}; start it again"
                self._end(0.0)
            return EngineError(self.fault)

    def close(self) -> None:
        """End all followers; none is left when this returns."""
        with self.turn:
            if not self.fault:
                self.fault = f"{self.engine} was closed"
                for pipe in self._pipes:
                    try:
                        pipe.send_bytes(pack("close"))
                    except OSError:  # it has ended already
                        continue
                self._end(_GRACE)

    def _cause(self, error: Exception | None) -> str:
        """Which rank ended first, as far as can be told, and how."""
        deadline = time.monotonic() + _GRACE
        while True:
            ended = [(rank, one) for rank, one in enumerate(self._processes, 1) if not one.is_alive()]
            for rank, process in ended:
                if words := self._last_words(rank):
                    return f"rank {rank} of {self.world} failed: {words}"
                if process.exitcode not in (0, LOST):
                    return f"the process of rank {rank} of {self.world} {_ending(process.exitcode)}"
            alive = [one.sentinel for one in self._processes if one.is_alive()]
            left = deadline - time.monotonic()
            if not alive or left <= 0:
                return f"its {self.world} ranks lost each other" + (f" ({error})" if error else "")
            wait(alive, left)

    def _last_words(self, rank: int) -> str:
        pipe = self._pipes[rank - 1]
        try:
            while pipe.poll():
                verb, content = unpack(pipe.recv_bytes())
                if verb == "failed":
                    return content
        except (EOFError, OSError):
            pass
        return ""

    def _end(self, grace: float) -> None:
        self._closing = True
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join()
            pipe.close()
        self._folder.cleanup()


def _ending(code: int | None) -> str:
    assert code is not None
    return f"ended with exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
