"""Wire protocol of the sandbox supervisor: one run request in, one result out, each a JSON head and raw bytes.

Both sides import it and the supervisor starts anew for each program, so it uses named tuples, which import quickly.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

MIB = 1 << 20
KilledBy = Literal["wall", "cpu", "memory", "output", "processes"]
Namespaces = Literal["user", "root", "bubblewrap", ""]
SandboxBackend = Literal["native", "bubblewrap"]


class IsolationPlan(NamedTuple):
    """Isolation mechanisms to use: namespaces (user namespace, real root, or bwrap's), Landlock ABI version, seccomp.

    ``apart`` means that without namespaces the program gets a user id of its own, which only root can assign; in
    namespaces it always gets one.
    """

    namespaces: Namespaces = ""
    landlock: int = 0
    seccomp: bool = False
    apart: bool = False


class SandboxLimits(NamedTuple):
    """Limits of one run. ``wall`` and ``cpu`` seconds, ``memory`` and ``processes`` count all its processes together.

    ``processes`` counts threads too. ``file`` is the largest file, ``scratch`` all files together, ``output`` standard
    output and standard error together; all three and ``memory`` are in bytes.
    """

    wall: float = 20.0
    cpu: float = 10.0
    memory: int = 512 * MIB
    processes: int = 16
    file: int = 64 * MIB
    scratch: int = 64 * MIB
    output: int = MIB


class RunRequest(NamedTuple):
    """One run. ``readable`` are the only paths outside the scratch folder the program may read and execute.

    ``companion`` is a second program in the same sandbox: its standard input and output are descriptors 4 and 3 of the
    first. Without one it is empty.
    """

    argv: tuple[str, ...]
    plan: IsolationPlan
    limits: SandboxLimits
    readable: tuple[str, ...]
    temporary: str
    files: Mapping[str, bytes]
    stdin: bytes
    companion: tuple[str, ...] = ()


class SandboxResult(NamedTuple):
    """How a program ended: exit status, or the signal that killed it, and the limit it exceeded, if any.

    A program that was denied a resource (memory, a file, a socket) saw the error and ended by its own choice.
    ``error`` is why the program could not be started at all.
    """

    exit: int | None = None
    signal: int | None = None
    killed_by: KilledBy | None = None
    seconds: float = 0.0
    error: str = ""
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def is_success(self) -> bool:
        """Whether it exited with status 0."""
        return self.exit == 0


_LENGTH = struct.Struct("<Q")


def encode_request(request: RunRequest) -> bytes:
    """Encode a request."""
    head = {
        "argv": request.argv,
        "plan": request.plan,
        "limits": request.limits,
        "readable": request.readable,
        "temporary": request.temporary,
        "files": [(name, len(body)) for name, body in request.files.items()],
        "stdin": len(request.stdin),
        "companion": request.companion,
    }
    return _encode(head, *request.files.values(), request.stdin)


def read_request(read: Callable[[int], bytes]) -> RunRequest:
    """Read a request from a stream."""
    head = json.loads(read_exactly(read, _LENGTH.unpack(read_exactly(read, _LENGTH.size))[0]))
    files = {name: read_exactly(read, size) for name, size in head["files"]}
    return RunRequest(
        argv=tuple(head["argv"]),
        plan=IsolationPlan(*head["plan"]),
        limits=SandboxLimits(*head["limits"]),
        readable=tuple(head["readable"]),
        temporary=head["temporary"],
        files=files,
        stdin=read_exactly(read, head["stdin"]),
        companion=tuple(head["companion"]),
    )


def encode_result(result: SandboxResult) -> bytes:
    """Encode a result."""
    head = [*result[:5], len(result.stdout), len(result.stderr)]
    return _encode(head, result.stdout, result.stderr)


def decode_result(data: bytes) -> SandboxResult | None:
    """Decode a result; None when the bytes are incomplete."""
    body = _LENGTH.size
    if len(data) < body:
        return None
    body += _LENGTH.unpack_from(data)[0]
    if len(data) < body:
        return None
    *known, out, err = json.loads(data[_LENGTH.size : body])
    if len(data) != body + out + err:
        return None
    return SandboxResult(*known, stdout=data[body : body + out], stderr=data[body + out :])


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Read ``size`` bytes from a stream that may return fewer at a time; EOFError when it ends before."""
    pieces: list[bytes] = []
    while size:
        piece = read(min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _encode(head: object, *bodies: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *bodies))
