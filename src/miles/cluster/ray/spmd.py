"""SPMD ranks on the nodes of a Ray cluster: processes there, each with a TCP connection to the leader.

One actor per rank starts the process and reports how it ended, so that a rank behaves as on one machine: it executes
the commands of its connection, and ends with the connection, with its actor, or with the run. Connections are
authenticated both ways with a key that only the actors have; messages are encoded by the group's codec, and never
pickled.
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
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from weakref import finalize

import ray
from ray.exceptions import RayError

from miles.cluster.heartbeat import HeartbeatMonitor, heartbeat_interval, start_heartbeat
from miles.cluster.process import find_free_port
from miles.cluster.ray.placement_group import BundleRange, ClusterReservation, create_actor, first_error_line
from miles.cluster.spmd import RankContext, RankMain, run_rank
from miles.core.errors import TrainerError
from miles.core.serialization import Codec

# Seconds until a process on the cluster has started and connected, and in which a connection must authenticate.
_START_SECONDS = 300.0
_AUTH_SECONDS = 10

_KILLED = -9


class RayRankLauncher:
    """A ``RankLauncher`` on the nodes of a cluster; ``rendezvous`` is where the ranks find each other."""

    def __init__(self, reservation: ClusterReservation) -> None:
        self._reservation = reservation
        self.address = reservation.address
        self.rendezvous = f"{reservation.address}:{find_free_port(reservation.address)}"

    def __call__(
        self, main: RankMain, contexts: Sequence[RankContext], codec: Codec
    ) -> list[tuple[RayRankProcess, Connection]]:
        """Start all ranks at once, and wait until each has connected."""
        key = secrets.token_bytes(32)
        with socket.create_server((self._reservation.address, 0)) as listener:
            address = listener.getsockname()[:2]
            processes = {
                context.rank: RayRankProcess(
                    self._reservation.rank_bundles(context.rank),
                    self._reservation.request.kind,
                    # Pickled here, so that the actor does not import what its rank does. It is sent from the run to
                    # its actor as Ray sends all arguments, and never over a connection.
                    (pickle.dumps((main, context, codec)), context.heartbeat_timeout, address, key),
                )
                for context in contexts
            }
            try:
                connections = _accept_ranks(listener, key, processes)
            except BaseException:
                for process in processes.values():
                    process.kill()
                raise
        for rank, process in processes.items():
            process.shut_down_at_end(connections[rank])
        return [(processes[context.rank], connections[context.rank]) for context in contexts]


class RayRankProcess:
    """Implements ``RankProcess`` for a rank on a node of the cluster."""

    def __init__(self, bundles: BundleRange, kind: str, args: tuple[Any, ...]) -> None:
        self._actor = create_actor(bundles, kind, _RankActor)
        self.sentinel, write_end = os.pipe()
        self._ended: Future[int] = self._actor.run.remote(*args).future()
        self._ended.add_done_callback(lambda _: os.close(write_end))  # the sentinel is readable from now on
        finalize(self, os.close, self.sentinel)

    def shut_down_at_end(self, connection: Connection) -> None:
        """Stop sending on its connection when it has ended: an unreachable node would block the sender."""
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))

        def shut_down(_: object) -> None:
            with duplicate, suppress(OSError):
                duplicate.shutdown(socket.SHUT_WR)

        self._ended.add_done_callback(shut_down)

    def is_alive(self) -> bool:
        return not self._ended.done()

    @property
    def exitcode(self) -> int | None:
        """None while it runs; that of SIGKILL if its actor or its node was lost."""
        if not self._ended.done():
            return None
        return _KILLED if self._ended.exception() is not None else self._ended.result()

    def describe_end(self) -> str:
        """How it ended."""
        error = self._ended.exception()
        return f"exit code {self._ended.result()}" if error is None else first_error_line(error)

    def join(self, timeout: float | None = None) -> None:
        with suppress(FutureTimeoutError, RayError):
            self._ended.result(timeout)

    def kill(self) -> None:
        ray.kill(self._actor)


class _RankActor:
    """Has one rank's process on the actor's node, and kills it when its heartbeats stop."""

    def run(self, pickled: bytes, heartbeat_timeout: float, address: tuple[str, int], key: bytes) -> int:
        with TemporaryDirectory(prefix="miles-rank-") as folder:
            heartbeat_file = Path(folder) / "heartbeat"
            process = multiprocessing.get_context("spawn").Process(
                target=_connect_and_run, args=(pickled, address, key, heartbeat_file), daemon=True
            )
            process.start()
            monitor = HeartbeatMonitor(heartbeat_file, heartbeat_timeout) if heartbeat_timeout else None
            while process.exitcode is None:
                process.join(heartbeat_interval(heartbeat_timeout) if heartbeat_timeout else None)
                if monitor is not None and not monitor.is_alive():
                    process.kill()
            return process.exitcode


def _connect_and_run(pickled: bytes, address: tuple[str, int], key: bytes, heartbeat_file: Path) -> None:
    """Entry point of a rank's process: connect to the leader, send the rank, and run."""
    arguments: tuple[RankMain, RankContext, Codec] = pickle.loads(pickled)
    main, context, codec = arguments
    if context.heartbeat_timeout:
        start_heartbeat(heartbeat_file, context.heartbeat_timeout)
    connection = cast(Connection, Client(address, authkey=key))
    connection.send_bytes(str(context.rank).encode())
    run_rank(main, context, connection, codec)


def _accept_ranks(listener: socket.socket, key: bytes, processes: dict[int, RayRankProcess]) -> dict[int, Connection]:
    connections: dict[int, Connection] = {}
    deadline = time.monotonic() + _START_SECONDS
    listener.settimeout(0.5)
    while len(connections) < len(processes):
        missing = sorted(processes.keys() - connections.keys())
        ended = next((rank for rank in missing if not processes[rank].is_alive()), None)
        if ended is not None:
            reason = processes[ended].describe_end()
            raise TrainerError(f"rank {ended} ended on the cluster before it had connected: {reason}; see its Ray logs")
        if time.monotonic() > deadline:
            raise TrainerError(f"rank {missing[0]} was not started by the cluster within {_START_SECONDS:g} s")
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            continue
        authenticated = _authenticate(accepted, key)
        if authenticated is not None and authenticated[0] in missing:
            connections[authenticated[0]] = authenticated[1]
    return connections


def _authenticate(accepted: socket.socket, key: bytes) -> tuple[int, Connection] | None:
    """The rank that connected, and its connection; None if it does not know the key, or is too slow."""
    accepted.settimeout(None)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _AUTH_SECONDS, 0))
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with socket.socket(fileno=os.dup(accepted.fileno())) as duplicate:
        connection = Connection(accepted.detach())
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank = int(connection.recv_bytes(16))
        except (AuthenticationError, OSError, EOFError, ValueError):
            connection.close()
            return None
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return rank, connection
