"""A three-node Ray cluster on this machine whose workers can be killed and disconnected.

The head runs the driver, and two workers the rest. With namespaces each worker has its own network, connected by a link
that can be cut; creating those needs root. The user of this class is also the node manager: a node that has ended is
started again. Closing it removes everything.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from miles.cluster import process

ROOT = Path(__file__).parents[1]
MARK = "MILES_CHAOS"
"""In the environment of all processes of a cluster: whose they are."""

WORKERS = ("one", "two")
# A node that is gone is noticed in a few seconds: three questions, each of which may be late by two.
WATCH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
UNPLUGGED = 15.0
"""Seconds for which a wire is pulled: longer than a cluster needs to give its node up, and than a heartbeat."""
ABSENT = 10.0
"""Seconds after which a node that has ended is started again, where the run has not gone on before."""

_STARTING = 300.0
_LOOK = 0.1


@dataclass(kw_only=True)
class Node:
    """One of the cluster's machines: the program that has its raylet, and since when it is gone."""

    name: str
    address: str
    cpus: int
    process: subprocess.Popen[bytes] | None = None
    gone: float | None = None
    space: str | None = None
    plugged_at: float | None = None
    lives: int = field(default=0)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Cluster:
    """A head with ``head_cpus``, and workers, of which the first has ``worker_cpus`` and the second one more.

    ``folder`` gets what the nodes say.
    """

    def __init__(self, folder: Path, *, namespaces: bool = False, head_cpus: int = 1, worker_cpus: int = 2) -> None:
        self._folder = folder.resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._session = Path(tempfile.mkdtemp(prefix="mc", dir="/tmp"))  # sockets have short names
        self.mark, self._token = f"chaos-{os.getpid()}-{secrets.token_hex(4)}", secrets.token_hex(32)
        number = os.getpid() % 100_000
        self._bridge = f"mc{number}b" if namespaces else None
        net = f"10.{64 + number % 60}.{number % 251}"
        self.head = Node(name="head", address=f"{net}.254" if namespaces else "127.0.0.1", cpus=head_cpus)
        self.workers = [
            Node(
                name=name,
                address=f"{net}.{i}" if namespaces else "127.0.0.1",
                cpus=worker_cpus + i - 1,
                space=f"mc{number}n{i}" if namespaces else None,
            )
            for i, name in enumerate(WORKERS, 1)
        ]
        self._port = 0

    # -- from the start to the end ------------------------------------------------------------

    @property
    def address(self) -> str:
        """For ``--ray-address``."""
        return f"{self.head.address}:{self._port}"

    @property
    def around(self) -> dict[str, str]:
        """The environment of whoever joins it."""
        watch = {f"RAY_health_check_{name}": str(value) for name, value in WATCH.items()}
        watch["RAY_worker_niceness"] = "0"  # whoever else is on this machine is served no better
        return {**watch, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, MARK: self.mark}

    @contextmanager
    def up(self) -> Iterator[Cluster]:
        """All nodes have joined; when this is left they are gone, whatever happened."""
        try:
            self._create_links()
            self._port = _free_port(self.head.address)
            self._join(self.head)
            self._join(*self.workers)
            yield self
        finally:
            self.close()

    def close(self) -> None:
        for node in (*self.workers, self.head):
            if node.process is not None and node.running:
                node.process.terminate()
        for node in (*self.workers, self.head):
            if node.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    node.process.wait(10)
                node.process.kill()
                node.process.wait()
        for pid in find_marked_processes(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in self.workers:
            if worker.space is not None:
                for pid in _ip("netns", "pids", worker.space, check=False).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", worker.space, check=False)
        if self._bridge is not None:
            _ip("link", "del", self._bridge, check=False)
        shutil.rmtree(self._session, ignore_errors=True)

    def _create_links(self) -> None:
        if self._bridge is None:
            return
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head.address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for worker in self.workers:
            assert worker.space is not None
            _ip("netns", "add", worker.space)
            _ip("link", "add", _wire(worker), "type", "veth", "peer", "name", "e0", "netns", worker.space)
            _ip("link", "set", _wire(worker), "master", self._bridge, "up")
            _ip("-n", worker.space, "addr", "add", f"{worker.address}/24", "dev", "e0")
            _ip("-n", worker.space, "link", "set", "e0", "up")
            _ip("-n", worker.space, "link", "set", "lo", "up")

    def _start(self, node: Node) -> None:
        inside = () if node.space is None else ("ip", "netns", "exec", node.space)
        head = ("--head", "--port", str(self._port), "--include-dashboard", "false")
        how = head if node is self.head else ("--address", self.address)
        own = self._session / f"{node.name}{node.lives}"  # as machines do, nodes share no folder of Ray's
        words = [
            *(*inside, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *how),
            *("--node-ip-address", node.address, "--num-cpus", str(node.cpus), "--object-store-memory", "90000000"),
            *("--temp-dir", str(own), "--dashboard-agent-listen-port", "0"),
        ]
        node.lives, node.gone = node.lives + 1, None
        with self._log(node).open("ab") as out:
            node.process = subprocess.Popen(
                words,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **self.around},
                start_new_session=True,
            )

    def _log(self, node: Node) -> Path:
        return self._folder / f"node-{node.name}-{max(1, node.lives)}.log"

    def _has_logged(self, node: Node, words: bytes) -> bool:
        return words in self._log(node).read_bytes()

    def _join(self, *nodes: Node) -> None:
        """Start them, and wait until all are there; Ray itself gives up after 30 s, so that it is tried again."""
        for node in nodes:
            self._start(node)
        deadline = time.monotonic() + _STARTING
        while late := [node for node in nodes if not self._has_logged(node, b"Ray runtime started")]:
            for node in late:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"node {node.name} did not start: {self._log(node).read_text()[-2000:]}")
                if not node.running:
                    self._start(node)
            time.sleep(_LOOK)

    # -- blows, and what the operator does ----------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """Are all nodes there, and joined by their wires?"""
        return all(
            node.running and node.plugged_at is None and self._has_logged(node, b"Ray runtime started")
            for node in self.workers
        )

    def kill_node(self) -> str | None:
        """SIGKILL for the raylet of a worker; which, None where there is none just now."""
        node = self._busy()
        raylet = None if node is None else _raylet(node)
        if node is None or raylet is None:
            return None
        os.kill(raylet, signal.SIGKILL)
        return node.name

    def unplug(self) -> str | None:
        """Pull the wire of a worker, which ``tend`` plugs in again; which, None where there is none just now."""
        node = self._busy()
        if node is None:
            return None
        assert node.space is not None, "without namespaces there is no wire to pull"
        _ip("link", "set", _wire(node), "down")
        node.plugged_at = time.monotonic() + UNPLUGGED
        return node.name

    def _busy(self) -> Node | None:
        """A worker that has a part of the run."""
        parts = (b"ray::_RankActor", b"ray::Warden")
        above = {parent for _, parent, words in processes() if words.startswith(parts)}
        busy = [node for node in self.workers if _raylet(node) in above]
        return random.choice(busy) if busy else None

    def tend(self, *, going: bool) -> None:
        """Plug in what has been out for long enough, and start nodes that ended; ``going``: the run goes on anyway."""
        now = time.monotonic()
        for node in self.workers:
            if node.plugged_at is not None and now > node.plugged_at:
                _ip("link", "set", _wire(node), "up")
                node.plugged_at = None
            if node.running or node.plugged_at is not None:
                continue
            node.gone = now if node.gone is None else node.gone
            if going or now - node.gone > ABSENT:
                self._start(node)

    # -- who is there -------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """The processes of trainer ranks on the workers."""
        family = {pid: (parent, words) for pid, parent, words in processes()}
        return [
            pid
            for pid, (parent, words) in family.items()
            if b"spawn_main" in words
            and family.get(parent, (0, b""))[1].startswith(b"ray::_RankActor")
            and _is_marked(pid, self.mark)
        ]

    def engines(self) -> list[int]:
        """The processes of engine servers: children of a guard that an actor has."""
        family = {pid: (parent, words) for pid, parent, words in processes()}
        guards = {pid for pid, (_, words) in family.items() if GUARD in words and _is_marked(pid, self.mark)}
        return [pid for pid, (parent, _) in family.items() if parent in guards]


GUARD = os.fsencode(process.__file__)
"""A word of the command of each guard; the engine server is its child."""


def processes() -> Iterator[tuple[int, int, bytes]]:
    """Every process of this machine: its number, its parent's, and its words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                yield int(entry.name), parent, (entry / "cmdline").read_bytes()


def find_marked_processes(mark: str) -> list[int]:
    """The processes of a cluster that can still be told by their environment; Ray's own overwrite it."""
    return [pid for pid, _, _ in processes() if pid != os.getpid() and _is_marked(pid, mark)]


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _raylet(node: Node) -> int | None:
    if node.process is None:
        return None
    return next(
        (
            pid
            for pid, parent, words in processes()
            if parent == node.process.pid and words.split(b"\0")[0].endswith(b"/raylet")
        ),
        None,
    )


def _wire(node: Node) -> str:
    return f"{node.space}v"


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def networks() -> bool:
    """Can this process make networks?"""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mc{os.getpid() % 100_000}t"
    made = subprocess.run(("ip", "link", "add", name, "type", "bridge"), capture_output=True, check=False)
    _ip("link", "del", name, check=False)
    return made.returncode == 0
