"""What the supervisor is told and what it answers, as one JSON head and raw bytes each way.

Both sides import it, so it is built of what starts quickly: named tuples instead of dataclasses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

KilledBy = Literal["wall", "cpu", "memory", "output", "processes"]
Namespaces = Literal["user", "root", ""]


class Plan(NamedTuple):
    """Which walls to build: namespaces (in a user namespace, or as the machine's root), Landlock's version, seccomp.

    ``apart`` says that without namespaces the program gets a user id of its own, which only root can give; in
    namespaces it always does.
    """

    namespaces: Namespaces = ""
    landlock: int = 0
    seccomp: bool = False
    apart: bool = False


class Bounds(NamedTuple):
    """The limits, as plain numbers."""

    wall: float
    cpu: float
    memory: int
    processes: int
    file: int
    scratch: int
    output: int


class Order(NamedTuple):
    """One run. ``readable`` are the only paths outside the scratch folder the program may read and execute."""

    argv: tuple[str, ...]
    plan: Plan
    bounds: Bounds
    readable: tuple[str, ...]
    temporary: str
    files: Mapping[str, bytes]
    stdin: bytes


class Answer(NamedTuple):
    """What came of it; ``error`` is why the program could not be started at all."""

    exit: int | None = None
    signal: int | None = None
    killed_by: KilledBy | None = None
    seconds: float = 0.0
    error: str = ""
    stdout: bytes = b""
    stderr: bytes = b""


_LENGTH = struct.Struct("<Q")


def packed_order(order: Order) -> bytes:
    """An order as bytes."""
    head = {
        "argv": order.argv,
        "plan": order.plan,
        "bounds": order.bounds,
        "readable": order.readable,
        "temporary": order.temporary,
        "files": [(name, len(body)) for name, body in order.files.items()],
        "stdin": len(order.stdin),
    }
    return _packed(head, *order.files.values(), order.stdin)


def read_order(read: Callable[[int], bytes]) -> Order:
    """An order from bytes that come in pieces."""
    head = json.loads(exactly(read, _LENGTH.unpack(exactly(read, _LENGTH.size))[0]))
    files = {name: exactly(read, size) for name, size in head["files"]}
    return Order(
        argv=tuple(head["argv"]),
        plan=Plan(*head["plan"]),
        bounds=Bounds(*head["bounds"]),
        readable=tuple(head["readable"]),
        temporary=head["temporary"],
        files=files,
        stdin=exactly(read, head["stdin"]),
    )


def packed_answer(answer: Answer) -> bytes:
    """An answer as bytes."""
    head = [*answer[:5], len(answer.stdout), len(answer.stderr)]
    return _packed(head, answer.stdout, answer.stderr)


def read_answer(data: bytes) -> Answer | None:
    """An answer from bytes, or None when they are not a whole one."""
    body = _LENGTH.size
    if len(data) < body:
        return None
    body += _LENGTH.unpack_from(data)[0]
    if len(data) < body:
        return None
    *known, out, err = json.loads(data[_LENGTH.size : body])
    if len(data) != body + out + err:
        return None
    return Answer(*known, stdout=data[body : body + out], stderr=data[body + out :])


def exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """``size`` bytes of something that may give fewer at a time; EOFError when it ends before."""
    pieces: list[bytes] = []
    while size:
        piece = read(min(size, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _packed(head: object, *bodies: bytes) -> bytes:
    text = json.dumps(head).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *bodies))
