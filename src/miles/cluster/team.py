"""A team of ranks: processes that do one thing together, started, spoken to, watched, and ended by the first of them.

Rank 0 is the process that makes the team, and leads; every other rank is a process of its own, joined to it by a pipe.
A follower does what its pipe says, in order, and ends when the pipe or the leader does, wherever it is: none outlives
the leader, however that ends. Who waits for whom: a follower for its pipe, without a deadline; the leader for replies,
with one. How tensors go between ranks is the team's own affair; so is telling (``Lost``) that it broke down.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, cast

from miles.cluster import stacks
from miles.cluster.pulse import Pulse, beat, interval
from miles.core.errors import MilesError
from miles.core.wire import Codec

# How processes are started: a fork would take over a device that is in use.
START: Literal["spawn", "forkserver"] = "spawn"

# How a follower ends that lost the others: whoever ended otherwise is the cause.
LOST = 75

# Seconds a process is given to end by itself, or to say why it did.
_GRACE = 5.0

# Longer messages are laid down once for all to read, and not sent to one after the other.
_LONG = 1 << 20
_LAID = "laid down"

_CODEC = Codec(())


class Lost(MilesError):
    """Another rank is gone, or too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place among the ``world`` of a ``team``: its device, and where the ranks meet.

    That is in a ``folder``, or, where they are on several machines, at ``meeting``, a host:port of the leader's.
    ``apart``: no two share a device. With a ``heartbeat``, whoever shows no sign of life for so many seconds is ended
    (on this machine). Tracebacks of what no one expected go to ``logs``, where there is such a folder.
    """

    team: str
    rank: int
    world: int
    device: str
    apart: bool
    folder: Path
    patience: float
    logs: Path | None = None
    meeting: str = ""
    heartbeat: float = 0.0

    @property
    def beats(self) -> Path:
        """Where the rank shows that it lives."""
        return self.folder / f"beat-{self.rank}"


class Line:
    """A follower's end of its pipe."""

    def __init__(self, pipe: Connection, codec: Codec) -> None:
        self._pipe = pipe
        self._codec = codec

    def hear(self) -> tuple[str, Any]:
        """The next message; EOFError when the leader is gone."""
        verb, content = self._codec.unpack(self._pipe.recv_bytes())
        if verb != _LAID:
            return verb, content
        with open(content, "rb") as file:  # a page that is written to becomes this process's own
            return self._codec.unpack(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))

    def say(self, verb: str, content: Any = None) -> None:
        self._pipe.send_bytes(self._codec.pack(verb, content))


Follow = Callable[[Place, Line], None]


def serve(follow: Follow, place: Place, pipe: Connection, codec: Codec) -> None:
    """The life of a follower's process."""
    # Ctrl-C and SIGTERM are sent to all of a group, but the leader's to act on.
    for told in (signal.SIGINT, signal.SIGTERM):
        signal.signal(told, signal.SIG_IGN)
    stacks.register(f"{place.team} rank {place.rank}")
    if place.heartbeat and not place.meeting:
        beat(place.beats, place.heartbeat)
    threading.Thread(target=_end_with_the_leader, args=(place,), name="leader watch", daemon=True).start()
    try:
        follow(place, Line(pipe, codec))
    except (EOFError, ConnectionError):  # the leader is gone, and could not clear up
        rmtree(place.folder, ignore_errors=True)
        sys.exit(0)
    except Lost:
        sys.exit(LOST)
    except Exception as error:
        pipe.send_bytes(_CODEC.pack("failed", said(error) + logged(error, place)))
        sys.exit(1)


def _end_with_the_leader(place: Place) -> None:
    """A rank may be waiting for others on a device, where no pipe is heard."""
    leader = multiprocessing.parent_process()
    assert leader is not None
    wait((leader.sentinel,))
    rmtree(place.folder, ignore_errors=True)
    os._exit(0)


def said(error: BaseException) -> str:
    """An error in a line: libraries go on for more. Ours need no name."""
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return first if isinstance(error, MilesError) else f"{type(error).__name__}: {first}"


def logged(error: Exception, place: Place) -> str:
    """Write down where an error came from that nobody expected; what to add to a sentence about it."""
    if place.logs is None or isinstance(error, MilesError):
        return ""
    place.logs.mkdir(parents=True, exist_ok=True)
    file = place.logs / f"rank-{place.rank}.txt"
    file.write_text("".join(traceback.format_exception(error)))
    return f" (its traceback is in {file})"


class Process(Protocol):
    """What a leader knows of a follower's process; ``sentinel`` can be read when it has ended."""

    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


Starts = Callable[[Follow, Sequence[Place], Codec], Sequence[tuple[Process, Connection]]]
"""Starts a follower at each of the places: its process, and the leader's end of its line."""


def spawned(follow: Follow, places: Sequence[Place], codec: Codec) -> list[tuple[Process, Connection]]:
    """Followers on this machine."""
    context, started = cast(SpawnContext, multiprocessing.get_context(START)), []
    for place in places:
        pipe, far = cast("tuple[Connection, Connection]", Pipe())
        process = context.Process(
            target=serve, args=(follow, place, far, codec), name=f"{place.team} rank {place.rank}", daemon=True
        )
        process.start()
        far.close()
        started.append((process, pipe))
    return started


class Team:
    """The followers of one leader, all of whom do what ``follow`` does.

    Once there is a ``fault``, a sentence, they are gone, and whatever is asked of them is answered by it, as an
    ``error`` that ends with the ``mend``; ``cause`` is that of the fault, and ``gone`` whether a rank died or hangs for
    no reason it could tell, so that another try may well succeed.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        follow: Follow,
        *,
        codec: Codec,
        apart: bool,
        patience: float,
        error: Callable[[str], MilesError],
        mend: str,
        logs: Path | None = None,
        starts: Starts = spawned,
        meeting: str = "",
        heartbeat: float = 0.0,
    ) -> None:
        self.name = name
        self.world = len(devices)
        self.patience = patience
        self.fault = ""
        # Messages and the tensors that belong to them go out together.
        self.turn = threading.RLock()
        self._codec, self._error, self._mend = codec, error, mend
        self._folder = TemporaryDirectory(prefix="miles-ranks-")
        self._laid: list[Path] = []
        self.place = Place(
            team=name,
            rank=0,
            world=self.world,
            device=devices[0],
            apart=apart,
            folder=Path(self._folder.name),
            patience=patience,
            logs=logs,
            meeting=meeting,
            heartbeat=heartbeat,
        )
        self._closing = False
        self.cause, self.gone = "", False
        self._silent: dict[int, str] = {}
        self._spoken_to = 0
        self._ended = threading.Event()
        places = [replace(self.place, rank=rank, device=devices[rank]) for rank in range(1, self.world)]
        started = starts(follow, places, codec)
        self._processes: list[Process] = [process for process, _ in started]
        self._pipes: list[Connection] = [pipe for _, pipe in started]
        self._places = places

    # -- speaking ---------------------------------------------------------------------------

    def tell(self, verb: str, content: Any = None) -> None:
        """Send everyone a message; they get to it after what they were told before."""
        message = self._codec.pack(verb, content)
        with self.turn:
            self.check()
            if len(message) > _LONG and not self.place.meeting:
                message = self._lay(message)
            late = threading.Timer(self.patience, self._deaf)
            late.start()
            try:
                for rank, pipe in enumerate(self._pipes, 1):
                    self._spoken_to = rank
                    pipe.send_bytes(message)
            except OSError as error:
                raise self.lose(error=error) from error
            finally:
                self._spoken_to = 0
                late.cancel()

    def replies(self, patience: float | None = None) -> list[Any]:
        """What each says to the last message, in order of rank; all within ``patience``, the team's when not given."""
        self.check()
        seconds = self.patience if patience is None else patience
        deadline = time.monotonic() + seconds
        sentinels = [process.sentinel for process in self._processes]  # who answered and then ended is missed by others
        out: list[Any] = []
        for rank, pipe in enumerate(self._pipes, 1):
            found = wait((pipe, *sentinels), max(0.0, deadline - time.monotonic()))
            try:
                if not pipe.poll():
                    late = f"rank {rank} of {self.world} did not answer within {seconds:g} s"
                    raise self.lose(None if found else late, gone=True)
                verb, content = self._codec.unpack(pipe.recv_bytes())
            except (EOFError, OSError) as error:
                raise self.lose(error=error) from error
            if verb == "failed":
                raise self.lose(f"rank {rank} of {self.world} failed: {content}")
            out.append(content)
        while self._laid:
            self._laid.pop().unlink(missing_ok=True)
        return out

    def check(self) -> None:
        """Raise the fault if there is one, which may be found here."""
        if not self.fault and not all(process.is_alive() for process in self._processes):
            self.lose()
        if self.fault:
            raise self._error(self.fault)

    def _deaf(self) -> None:
        """A pipe is full, and its rank has taken nothing out of it for the team's patience: it is ended for that."""
        rank = self._spoken_to
        if rank:
            self._silent[rank] = f"took no message for {self.patience:g} s and was ended"
            self._processes[rank - 1].kill()

    def _lay(self, message: bytes) -> bytes:
        path = self.place.folder / f"message-{time.monotonic_ns()}"
        path.write_bytes(message)
        self._laid.append(path)
        return self._codec.pack(_LAID, str(path))

    # -- ending -----------------------------------------------------------------------------

    def watch(self, lost: Callable[[], None]) -> None:
        """Call ``lost``, from another thread, as soon as a follower ends that was not told to."""
        sentinels = [process.sentinel for process in self._processes]

        def look() -> None:
            wait(sentinels)
            if not self._closing:
                lost()

        if sentinels:
            threading.Thread(target=look, name=f"{self.name} watch", daemon=True).start()

    def lose(self, cause: str | None = None, *, error: BaseException | None = None, gone: bool = False) -> MilesError:
        """Give up: find out what happened (unless told), end all, and say it in one sentence.

        ``error`` is what showed that something did; ``gone`` is that a rank died or hangs, for no reason it could tell.
        """
        with self.turn:
            if not self.fault:
                if cause is None:
                    cause, gone = self._cause(error)
                self.cause, self.gone = cause, gone
                self.fault = f"{self.name} had to close, because {cause}; {self._mend}"
                self._end(0.0)
            return self._error(self.fault)

    def close(self) -> None:
        """End all followers; none is left when this returns."""
        with self.turn:
            if not self.fault:
                self.fault, self._closing = f"{self.name} was closed", True
                for pipe in self._pipes:
                    try:
                        pipe.send_bytes(_CODEC.pack("close"))
                    except OSError:  # it has ended already
                        continue
                self._end(_GRACE)

    def feel(self) -> None:
        """From now on end whoever misses its heartbeats; before, all are busy with imports that let no thread beat."""
        if self.place.heartbeat and self._places and not self.place.meeting:
            threading.Thread(target=self._feel, name=f"{self.name} pulse", daemon=True).start()

    def _feel(self) -> None:
        """End whoever shows no sign of life: its end is noticed as any other's."""
        pulses = {place.rank: Pulse(place.beats, place.heartbeat) for place in self._places}
        while not self._ended.wait(interval(self.place.heartbeat)):
            for rank in [rank for rank, pulse in pulses.items() if not pulse.look()]:
                del pulses[rank]
                self._silent[rank] = (
                    f"gave no sign of life for {self.place.heartbeat:g} s (--heartbeat-timeout) and was ended"
                )
                self._processes[rank - 1].kill()

    def _cause(self, error: BaseException | None) -> tuple[str, bool]:
        """Which rank ended first, as far as can be told, and how; and whether it could not tell why."""
        deadline = time.monotonic() + _GRACE
        while True:
            alive = [one.sentinel for one in self._processes if one.is_alive()]
            for rank, process in enumerate(self._processes, 1):
                if process.sentinel in alive:
                    continue
                if words := self._last_words(rank):
                    return f"rank {rank} of {self.world} failed: {words}", False
                if rank in self._silent:
                    return f"rank {rank} of {self.world} {self._silent[rank]}", True
                if process.exitcode not in (0, LOST):
                    return f"the process of rank {rank} of {self.world} {_ending(process.exitcode)}", True
            left = deadline - time.monotonic()
            if not alive or left <= 0:
                return f"its {self.world} ranks lost each other" + (f" ({said(error)})" if error else ""), True
            wait(alive, left)

    def _last_words(self, rank: int) -> str:
        pipe = self._pipes[rank - 1]
        try:
            while pipe.poll():
                verb, content = self._codec.unpack(pipe.recv_bytes())
                if verb == "failed":
                    return content
        except (EOFError, OSError):
            pass
        return ""

    def _end(self, grace: float) -> None:
        self._closing = True
        self._ended.set()
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
