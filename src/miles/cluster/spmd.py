"""SPMD process group: launches the ranks, sends them commands over pipes, monitors them and ends them.

The leader is the process that creates the group. It is rank 0, or only drives the others where rank 0 too is a process
of its own; every such process has a pipe to the leader. A rank executes the commands of its pipe in order, and ends
when the pipe or the leader does: no rank outlives the leader, however that ends. Who waits for whom: a rank for its
pipe, without a timeout; the leader for replies, with one. How tensors are exchanged between ranks is up to the code
that runs on them, which raises ``RankLost`` when it fails.
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

from miles.cluster import stack_dump
from miles.cluster.heartbeat import HeartbeatMonitor, heartbeat_interval, start_heartbeat
from miles.cluster.oom_kill import OomKillMonitor
from miles.cluster.process import describe_exit
from miles.core.errors import MilesError
from miles.core.serialization import Codec

# A fork would take over a device that is in use.
START_METHOD: Literal["spawn", "forkserver"] = "spawn"

# Exit code of a rank that lost the others; a rank that ended with another one is the cause.
RANK_LOST_EXIT_CODE = 75

# Seconds a process is given to end by itself, or to report why it did.
_GRACE_SECONDS = 5.0

# Longer messages are written to a file once, and not to each pipe.
_MAX_PIPE_BYTES = 1 << 20
_FILE_MESSAGE = "file"

_CODEC = Codec(())


class RankLost(MilesError):
    """Another rank has ended, or is too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of a group: its device, and how ranks find each other.

    That is by files in ``folder``, or, if they are on several nodes, at ``rendezvous``, a host:port of the leader, who
    serves it itself if it is none of the ranks (without ``leader_is_rank``). ``exclusive_devices``: no two ranks share
    a device. With a ``heartbeat_timeout``, a rank without a heartbeat for so many seconds is killed (on this machine).
    Tracebacks of unexpected errors are written to ``log_dir``.
    """

    group_name: str
    rank: int
    world_size: int
    device: str
    exclusive_devices: bool
    folder: Path
    timeout: float
    log_dir: Path | None = None
    rendezvous: str = ""
    heartbeat_timeout: float = 0.0
    leader_is_rank: bool = True

    @property
    def heartbeat_file(self) -> Path:
        return self.folder / f"heartbeat-{self.rank}"


class RankChannel:
    """A rank's end of its pipe to the leader."""

    def __init__(self, pipe: Connection, codec: Codec) -> None:
        self._pipe = pipe
        self._codec = codec

    def receive(self) -> tuple[str, Any]:
        """The next command and its content; EOFError when the leader is gone."""
        verb, content = self._codec.unpack(self._pipe.recv_bytes())
        if verb != _FILE_MESSAGE:
            return verb, content
        with open(content, "rb") as file:  # copy on write: a page that is changed becomes this process's own
            return self._codec.unpack(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)))

    def send(self, verb: str, content: Any = None) -> None:
        self._pipe.send_bytes(self._codec.pack(verb, content))


RankMain = Callable[[RankContext, RankChannel], None]


def run_rank(main: RankMain, context: RankContext, pipe: Connection, codec: Codec) -> None:
    """Entry point of a rank's process."""
    # Ctrl-C and SIGTERM are sent to the whole process group, but handled by the leader.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    stack_dump.register_process(f"{context.group_name} rank {context.rank}")
    if context.heartbeat_timeout and not context.rendezvous:
        start_heartbeat(context.heartbeat_file, context.heartbeat_timeout)
    threading.Thread(target=_exit_with_leader, args=(context,), name="leader watch", daemon=True).start()
    try:
        main(context, RankChannel(pipe, codec))
    except (EOFError, ConnectionError):  # the leader is gone, and could not clean up
        rmtree(context.folder, ignore_errors=True)
        sys.exit(0)
    except RankLost:
        sys.exit(RANK_LOST_EXIT_CODE)
    except Exception as error:
        pipe.send_bytes(_CODEC.pack("failed", summarize_error(error) + log_traceback(error, context)))
        sys.exit(1)


def _exit_with_leader(context: RankContext) -> None:
    """Also while the rank waits for others on a device, when it does not read its pipe."""
    leader = multiprocessing.parent_process()
    assert leader is not None
    wait((leader.sentinel,))
    rmtree(context.folder, ignore_errors=True)
    os._exit(0)


def summarize_error(error: BaseException) -> str:
    """An error in one line, with its type unless it is ours."""
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return first if isinstance(error, MilesError) else f"{type(error).__name__}: {first}"


def log_traceback(error: Exception, context: RankContext) -> str:
    """Write the traceback of an unexpected error to a file; returns a remark on that for the error message."""
    if context.log_dir is None or isinstance(error, MilesError):
        return ""
    context.log_dir.mkdir(parents=True, exist_ok=True)
    file = context.log_dir / f"rank-{context.rank}.txt"
    file.write_text("".join(traceback.format_exception(error)))
    return f" (its traceback is in {file})"


class RankProcess(Protocol):
    """The process of a rank, as the leader sees it; ``sentinel`` becomes readable when it has ended."""

    @property
    def sentinel(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def is_alive(self) -> bool: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


RankLauncher = Callable[[RankMain, Sequence[RankContext], Codec], Sequence[tuple[RankProcess, Connection]]]
"""Starts the ranks: the process of each, and the leader's end of its pipe."""


def spawn_ranks(main: RankMain, contexts: Sequence[RankContext], codec: Codec) -> list[tuple[RankProcess, Connection]]:
    """Start ranks on this machine."""
    spawn = cast(SpawnContext, multiprocessing.get_context(START_METHOD))
    started: list[tuple[RankProcess, Connection]] = []
    for context in contexts:
        pipe, child_end = cast("tuple[Connection, Connection]", Pipe())
        process = spawn.Process(
            target=run_rank,
            args=(main, context, child_end, codec),
            name=f"{context.group_name} rank {context.rank}",
            daemon=True,
        )
        process.start()
        child_end.close()
        started.append((process, pipe))
    return started


class SpmdGroup:
    """The ranks of one leader, all of which run ``main``; without ``leader_is_rank``, rank 0 is a process too.

    After a failure all ranks are ended, and every call raises ``error`` with the sentence ``fault``, which ends with
    ``hint``. ``cause`` is the reason in the fault, and ``rank_died`` whether a rank died or hangs without having
    reported a reason, so that another try may well succeed.
    """

    def __init__(
        self,
        name: str,
        devices: Sequence[str],
        main: RankMain,
        *,
        codec: Codec,
        exclusive_devices: bool,
        timeout: float,
        error: Callable[[str], MilesError],
        hint: str,
        log_dir: Path | None = None,
        launcher: RankLauncher = spawn_ranks,
        rendezvous: str = "",
        heartbeat_timeout: float = 0.0,
        leader_is_rank: bool = True,
    ) -> None:
        self.name = name
        self.world_size = len(devices)
        self.timeout = timeout
        self.fault = ""
        self.cause = ""
        self.rank_died = False
        # A command and the tensors that belong to it are sent together.
        self.lock = threading.RLock()
        self._codec = codec
        self._error = error
        self._hint = hint
        self._folder = TemporaryDirectory(prefix="miles-ranks-")
        self._message_files: list[Path] = []
        self.context = RankContext(
            group_name=name,
            rank=0,
            world_size=self.world_size,
            device=devices[0],
            exclusive_devices=exclusive_devices,
            folder=Path(self._folder.name),
            timeout=timeout,
            log_dir=log_dir,
            rendezvous=rendezvous,
            heartbeat_timeout=heartbeat_timeout,
            leader_is_rank=leader_is_rank,
        )
        self._first = 1 if leader_is_rank else 0
        self._closing = False
        self._killed: dict[int, str] = {}
        self._sending_to: int | None = None
        self._ended = threading.Event()
        self._contexts = [
            replace(self.context, rank=rank, device=devices[rank]) for rank in range(self._first, self.world_size)
        ]
        self._oom_kills = OomKillMonitor()
        started = launcher(main, self._contexts, codec)
        self._processes: list[RankProcess] = [process for process, _ in started]
        self._pipes: list[Connection] = [pipe for _, pipe in started]

    # -- commands and replies ---------------------------------------------------------------

    def broadcast(self, verb: str, content: Any = None) -> None:
        """Send all ranks a command, which they execute after earlier ones."""
        message = self._codec.pack(verb, content)
        with self.lock:
            self.raise_if_failed()
            if len(message) > _MAX_PIPE_BYTES and not self.context.rendezvous:
                message = self._write_file(message)
            timer = threading.Timer(self.timeout, self._kill_blocked)
            timer.start()
            try:
                for rank, pipe in enumerate(self._pipes, self._first):
                    self._sending_to = rank
                    pipe.send_bytes(message)
            except OSError as error:
                raise self.fail(error=error) from error
            finally:
                self._sending_to = None
                timer.cancel()

    def gather_replies(self, timeout: float | None = None) -> list[Any]:
        """The reply of each rank to the last command, in order; all within ``timeout``, by default the group's."""
        self.raise_if_failed()
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        # A rank that replied and then ended fails the replies of the others.
        sentinels = [process.sentinel for process in self._processes]
        replies: list[Any] = []
        for rank, pipe in enumerate(self._pipes, self._first):
            ready = wait((pipe, *sentinels), max(0.0, deadline - time.monotonic()))
            try:
                if not pipe.poll():
                    late = f"rank {rank} of {self.world_size} did not reply within {seconds:g} s"
                    raise self.fail(None if ready else late, rank_died=True)
                verb, content = self._codec.unpack(pipe.recv_bytes())
            except (EOFError, OSError) as error:
                raise self.fail(error=error) from error
            if verb == "failed":
                raise self.fail(f"rank {rank} of {self.world_size} failed: {content}")
            replies.append(content)
        while self._message_files:
            self._message_files.pop().unlink(missing_ok=True)
        return replies

    def raise_if_failed(self) -> None:
        """Raise the fault if there is one, also one that is found now."""
        if not self.fault and not all(process.is_alive() for process in self._processes):
            self.fail()
        if self.fault:
            raise self._error(self.fault)

    def _kill_blocked(self) -> None:
        """Kill a rank whose pipe is full because it has not read it for the group's timeout."""
        rank = self._sending_to
        if rank is not None:
            self._killed[rank] = f"read no message for {self.timeout:g} s and was killed"
            self._processes[rank - self._first].kill()

    def _write_file(self, message: bytes) -> bytes:
        path = self.context.folder / f"message-{time.monotonic_ns()}"
        path.write_bytes(message)
        self._message_files.append(path)
        return self._codec.pack(_FILE_MESSAGE, str(path))

    # -- failure and end --------------------------------------------------------------------

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` from another thread as soon as a rank ends unexpectedly."""
        sentinels = [process.sentinel for process in self._processes]

        def wait_for_end() -> None:
            wait(sentinels)
            if not self._closing:
                on_lost()

        if sentinels:
            threading.Thread(target=wait_for_end, name=f"{self.name} watch", daemon=True).start()

    def fail(
        self, cause: str | None = None, *, error: BaseException | None = None, rank_died: bool = False
    ) -> MilesError:
        """End all ranks, and return the error to raise; the cause is found out unless it is given.

        ``error`` is the symptom; ``rank_died``: a rank died or hangs without having reported a reason.
        """
        with self.lock:
            if not self.fault:
                if cause is None:
                    cause, rank_died = self._find_cause(error)
                self.cause = cause
                self.rank_died = rank_died
                self.fault = f"{self.name} was stopped, because {cause}; {self._hint}"
                self._end(0.0)
            return self._error(self.fault)

    def close(self) -> None:
        """End all ranks; none is left when this returns."""
        with self.lock:
            if not self.fault:
                self.fault = f"{self.name} was closed"
                self._closing = True
                for pipe in self._pipes:
                    try:
                        pipe.send_bytes(_CODEC.pack("close"))
                    except OSError:  # it has ended already
                        continue
                self._end(_GRACE_SECONDS)

    def start_heartbeat_monitor(self) -> None:
        """Kill ranks without a heartbeat from now on; before, imports may block their heartbeat threads."""
        if self.context.heartbeat_timeout and self._contexts and not self.context.rendezvous:
            threading.Thread(target=self._monitor_heartbeats, name=f"{self.name} heartbeats", daemon=True).start()

    def _monitor_heartbeats(self) -> None:
        timeout = self.context.heartbeat_timeout
        monitors = {context.rank: HeartbeatMonitor(context.heartbeat_file, timeout) for context in self._contexts}
        while not self._ended.wait(heartbeat_interval(timeout)):
            self._oom_kills.note_alive()
            for rank in [rank for rank, monitor in monitors.items() if not monitor.is_alive()]:
                del monitors[rank]
                self._killed[rank] = f"sent no heartbeat for {timeout:g} s (--heartbeat-timeout) and was killed"
                self._processes[rank - self._first].kill()

    def _find_cause(self, error: BaseException | None) -> tuple[str, bool]:
        """Which rank probably ended first, and how; and whether it ended without having reported a reason."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            alive = [process.sentinel for process in self._processes if process.is_alive()]
            for rank, process in enumerate(self._processes, self._first):
                if process.sentinel in alive:
                    continue
                if message := self._read_failure(rank):
                    return f"rank {rank} of {self.world_size} failed: {message}", False
                if rank in self._killed:
                    return f"rank {rank} of {self.world_size} {self._killed[rank]}", True
                code = process.exitcode
                assert code is not None
                if code not in (0, RANK_LOST_EXIT_CODE):
                    return f"rank {rank} of {self.world_size} ended with {self._describe_exit(code)}", True
            left = deadline - time.monotonic()
            if not alive or left <= 0:
                symptom = f" ({summarize_error(error)})" if error else ""
                return f"its {self.world_size} ranks lost the connection to each other{symptom}", True
            wait(alive, left)

    def _describe_exit(self, code: int) -> str:
        """How a rank ended; the memory of other nodes is not known here."""
        return describe_exit(code) if self.context.rendezvous else self._oom_kills.describe_exit(code)

    def _read_failure(self, rank: int) -> str:
        pipe = self._pipes[rank - self._first]
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
