"""Followers of a team on the nodes of a Ray cluster: each is a process there, joined to the leader by a TCP connection.

An actor a rank starts the process and says how it ended, so that a rank is what it is on one machine: it does what its
line says, and ends with the line, with its actor, or with the run. Lines begin with a proof, both ways, of a key that
goes to the actors alone; what they carry is the team's own code, and never a pickle.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import finalize

import ray
from ray.exceptions import RayError

from miles.cluster.pulse import Pulse, beat, interval
from miles.cluster.ray.reserve import Reserved, Spot, actor_at
from miles.cluster.team import Follow, Place, serve
from miles.core.errors import TrainerError
from miles.core.wire import Codec

# Seconds until a process there has started and called, and in which a caller proves that it is one of ours.
_STARTING = 300.0
_PROVING = 10

_KILLED = -9


class FarRanks:
    """How a team starts followers elsewhere; ``meeting`` is where its ranks find each other."""

    def __init__(self, reserved: Reserved) -> None:
        self._reserved = reserved
        self.meeting = f"{reserved.address}:{_free_port(reserved.address)}"

    def __call__(self, follow: Follow, places: Sequence[Place], codec: Codec) -> list[tuple[FarProcess, Connection]]:
        """Start them all at once, and wait until each has called."""
        key = secrets.token_bytes(32)
        with socket.create_server((self._reserved.address, 0)) as door:
            address = door.getsockname()[:2]
            processes = {
                place.rank: FarProcess(
                    self._reserved.rank(place.rank),
                    self._reserved.need.kind,
                    # Closed, so that the actor need not import all that its rank does. It goes from the run to its
                    # actor as Ray's own arguments do, and never over a line.
                    (pickle.dumps((follow, place, codec)), place.heartbeat, address, key),
                )
                for place in places
            }
            try:
                lines = _callers(door, key, processes)
            except BaseException:
                for process in processes.values():
                    process.kill()
                raise
        for rank, process in processes.items():
            process.ends(lines[rank])
        return [(processes[place.rank], lines[place.rank]) for place in places]


class FarProcess:
    """A rank's process, as the leader sees it; the part of multiprocessing's own that a team uses."""

    def __init__(self, spot: Spot, kind: str, what: tuple[Any, ...]) -> None:
        self._actor = actor_at(spot, kind, _RankSeat)
        self.sentinel, self._mark = os.pipe()
        self._ended: Future[int] = self._actor.run.remote(*what).future()
        self._ended.add_done_callback(lambda _: os.close(self._mark))  # the sentinel can be read from now on
        finalize(self, os.close, self.sentinel)

    def ends(self, line: Connection) -> None:
        """Nothing more is sent on its line when it has ended: a node that is cut off would never take it."""
        way = socket.socket(fileno=os.dup(line.fileno()))

        def end(_: object) -> None:
            with way, suppress(OSError):
                way.shutdown(socket.SHUT_WR)

        self._ended.add_done_callback(end)

    def is_alive(self) -> bool:
        return not self._ended.done()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; lost with its actor or its node is as good as killed."""
        if not self._ended.done():
            return None
        return _KILLED if self._ended.exception() is not None else self._ended.result()

    def join(self, timeout: float | None = None) -> None:
        with suppress(Late, RayError):
            self._ended.result(timeout)

    def kill(self) -> None:
        ray.kill(self._actor)


class _RankSeat:
    """Has one rank's process on the node it is on, and ends it when it shows no sign of life."""

    def run(self, life: bytes, patience: float, address: tuple[str, int], key: bytes) -> int:
        with TemporaryDirectory(prefix="miles-rank-") as own:
            beats = Path(own) / "beat"
            process = multiprocessing.get_context("spawn").Process(
                target=_call, args=(life, address, key, beats), daemon=True
            )
            process.start()
            pulse = Pulse(beats, patience) if patience else None
            while process.exitcode is None:
                process.join(interval(patience) if patience else None)
                if pulse is not None and not pulse.look():
                    process.kill()
            return process.exitcode


def _call(life: bytes, address: tuple[str, int], key: bytes, beats: Path) -> None:
    """The life of a rank's process: call the leader, say who it is, and serve."""
    known: tuple[Follow, Place, Codec] = pickle.loads(life)
    follow, place, codec = known
    if place.heartbeat:
        beat(beats, place.heartbeat)
    line = cast(Connection, Client(address, authkey=key))
    line.send_bytes(str(place.rank).encode())
    serve(follow, place, line, codec)


def _callers(door: socket.socket, key: bytes, processes: dict[int, FarProcess]) -> dict[int, Connection]:
    lines: dict[int, Connection] = {}
    deadline = time.monotonic() + _STARTING
    door.settimeout(0.5)
    while len(lines) < len(processes):
        missing = sorted(processes.keys() - lines.keys())
        ended = next((rank for rank in missing if not processes[rank].is_alive()), None)
        if ended is not None or time.monotonic() > deadline:
            late = f"rank {missing[0]} was not started by the cluster within {_STARTING:g} s"
            raise TrainerError(
                late if ended is None else f"rank {ended} ended on the cluster before it had called; see its Ray logs"
            )
        try:
            caller, _ = door.accept()
        except TimeoutError:
            continue
        if (found := _proven(caller, key)) is not None and found[0] in missing:
            lines[found[0]] = found[1]
    return lines


def _proven(caller: socket.socket, key: bytes) -> tuple[int, Connection] | None:
    """The rank that called, and its line; None for whoever does not know the key, or is too slow to show it."""
    limit = struct.pack("ll", _PROVING, 0)
    caller.settimeout(None)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with socket.socket(fileno=os.dup(caller.fileno())) as same:
        line = Connection(caller.detach())
        try:
            deliver_challenge(line, key)
            answer_challenge(line, key)
            rank = int(line.recv_bytes(16))
        except (AuthenticationError, OSError, EOFError, ValueError):
            line.close()
            return None
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return rank, line


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]
