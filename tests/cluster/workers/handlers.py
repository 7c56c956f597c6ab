"""Request handlers of the test workers, in a module that is quick to import."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path


def make(folder: Path) -> Callable[[bytes], Awaitable[bytes]]:
    """Each question is noted where it was begun; a word of it says what else becomes of it."""

    async def answer(question: bytes) -> bytes:
        with (folder / "begun.txt").open("ab") as file:
            file.write(question + b"\n")
        match question.split(b":")[0]:
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"once" if not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case b"spin":
                while True:
                    pass
            case b"wait":
                await asyncio.Event().wait()
            case b"until":
                while not (folder / "go").exists():
                    await asyncio.sleep(0.005)
        return question + f" by {os.getpid()}".encode()

    return answer


def refuse() -> Callable[[bytes], Awaitable[bytes]]:
    raise ValueError("nothing can be made here")


def workers_of_ray() -> dict[int, int]:
    """The processes of workers on the nodes of a cluster, and those of their actors."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                actor = Path(f"/proc/{above}/cmdline").read_bytes()
            except OSError:
                continue
            if b"miles.cluster.workers.process" in words and actor.startswith(b"ray::_WorkerActor"):
                found[int(entry.name)] = above
    return found
