"""A server's process on this machine, with a log of its own; ``guard`` ends it with whoever started it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles.core.errors import EngineError

GUARD = Path(__file__).with_name("guard.py")
GRACE_SECONDS = 5.0
_TAIL = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a server is started: the words before its address, and what it finds in its environment.

    ``settings`` are written to a file that nobody else may read, which is named behind ``settings_flag``: what others
    may not see, and the server does not take from its environment.
    """

    words: tuple[str, ...]
    host_flag: str = "--host"
    port_flag: str = "--port"
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_flag: str = "--config"


class Process:
    """One server's, from ``start`` to ``end``, which may follow each other again and again."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._settings: Path | None = None
        self._began = 0

    @property
    def pid(self) -> int | None:
        """Of the program that guards it, the parent of the server's own."""
        return None if self._process is None else self._process.pid

    def start(self, command: Command, host: str) -> int:
        """Start it on a port that is free; returns that."""
        port = free_port(host)
        words = [*command.words, command.host_flag, host, command.port_flag, str(port)]
        if command.settings:
            words += [command.settings_flag, str(self._write(command.settings))]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        reading, self._pipe = os.pipe()
        try:
            with self.log.open("ab") as out:
                out.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(words)}\n".encode())
                out.flush()
                self._began = out.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(GUARD), str(reading), *words],
                    env={**os.environ, **command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=(reading,),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"{self.name} cannot be started: {error}") from error
        finally:
            os.close(reading)
        return port

    def _write(self, settings: Mapping[str, str]) -> Path:
        descriptor, name = tempfile.mkstemp(prefix="miles-server-", suffix=".yaml")
        self._settings = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        return self._settings

    def alive(self) -> str | None:
        """How it ended, if it did."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"{self.name} ended with {_ending(code)}"

    def wait(self) -> str:
        """How it ended, when it has."""
        assert self._process is not None
        return f"{self.name} ended with {_ending(self._process.wait())}"

    def tail(self) -> str:
        """The last lines of what it said since it was started."""
        with self.log.open("rb") as file:
            file.seek(max(self._began, self.log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL:]) or "  (it said nothing)"

    def end(self) -> None:
        """End it, kindly first."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._pipe is not None:
            os.close(self._pipe)  # now, if it is still there, the guard ends it
            self._pipe = None
        if process is not None:
            process.wait()
        if self._settings is not None:
            self._settings.unlink(missing_ok=True)
            self._settings = None


def free_port(host: str) -> int:
    """One that nobody listens on just now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def _ending(code: int) -> str:
    """A status of the guard's: what a server's own was, or the signal that ended it."""
    if code > 128 and code - 128 in {number.value for number in signal.Signals}:
        return signal.Signals(code - 128).name
    return f"exit status {code}"
