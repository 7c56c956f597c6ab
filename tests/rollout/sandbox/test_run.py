"""A program that means well is not harmed by the walls: what it reads, writes and starts is as it would be outside."""

import asyncio
import os
import sys

import pytest

from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import IsolationPlan, SandboxLimits
from miles.rollout.sandbox.run import Sandbox

WELL_MEANT = {
    "reads and writes": ("a, b = map(int, input().split())\nprint(a + b)", b"2 40\n", b"42\n"),
    "writes no newline": ("import sys\nsys.stdout.write('no end')", b"", b"no end"),
    "handles other letters": ("print(input()[::-1])", "äöü→\n".encode(), "→üöä\n".encode()),
    "reads all at once": ("import sys\nprint(len(sys.stdin.buffer.read()))", b"x" * 3_000_000, b"3000000\n"),
    "does not read": ("print('done')", b"x" * 3_000_000, b"done\n"),
    "keeps files": ("open('a/b.txt', 'w').write('1')", b"", b""),
    "makes temporary files": (
        "import tempfile, os\nwith tempfile.NamedTemporaryFile('w+') as f:\n  f.write('1'); f.flush(); f.seek(0)\n"
        "  print(f.read(), os.path.dirname(f.name) == os.environ['TMPDIR'])",
        b"",
        b"1 True\n",
    ),
    "uses threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(lambda x: x * x, range(100))))",
        b"",
        b"328350\n",
    ),
    "uses asyncio": (
        "import asyncio\nasync def f(x):\n  await asyncio.sleep(0.001); return x\n"
        "async def main(): print(sum(await asyncio.gather(*map(f, range(10)))))\nasyncio.run(main())",
        b"",
        b"45\n",
    ),
    "starts a process": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-S', '-c', 'print(7)'], capture_output=True).stdout.decode().strip())",
        b"",
        b"7\n",
    ),
    "shares work between processes": (
        "import multiprocessing\nm = multiprocessing.get_context('fork')\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n  with m.Pool(2) as pool: print(pool.map(f, range(5)))",
        b"",
        b"[0, 1, 4, 9, 16]\n",
    ),
    "signals itself": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('caught'))\nos.kill(os.getpid(), 10)",
        b"",
        b"caught\n",
    ),
    "uses the library": (
        "import bisect, collections, decimal, fractions, functools, hashlib, heapq, itertools, json, math, random, re\n"
        "import datetime, statistics, string, zlib\n"
        "print(hashlib.sha256(b'x').hexdigest()[:4], math.comb(9, 3), json.dumps({'a': [1]}), fractions.Fraction(1))",
        b"",
        b'2d71 84 {"a": [1]} 1\n',
    ),
    "recurses": (
        "import sys\nsys.setrecursionlimit(20_000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(9_000))",
        b"",
        b"9000\n",
    ),
}


@pytest.mark.parametrize("name", WELL_MEANT)
def test_a_program_is_unharmed_that(name, plan):
    program, stdin, stdout = WELL_MEANT[name]
    outcome = asyncio.run(Sandbox(plan).run(program, stdin=stdin, files={"a/c.txt": b""}))
    assert (outcome.stdout, outcome.exit, outcome.killed_by) == (stdout, 0, None), outcome.stderr.decode()


def test_it_says_how_a_program_ended(plan):
    sandbox = Sandbox(plan)

    async def ended(program: str) -> tuple[int | None, int | None]:
        outcome = await sandbox.run(program)
        assert outcome.killed_by is None and outcome.seconds > 0
        return outcome.exit, outcome.signal

    async def all_ended() -> None:
        assert await ended("") == (0, None)
        assert await ended("import sys; sys.exit(3)") == (3, None)
        assert await ended("1 / 0") == (1, None)
        assert await ended("import os; os.abort()") == (None, 6)
        assert await ended("import ctypes; ctypes.string_at(0)") == (None, 11)
        assert await ended("not python") == (1, None)

    asyncio.run(all_ended())


def test_commands_run_too(plan):
    outcome = asyncio.run(
        Sandbox(plan).run(["sh", "-c", "read x; echo $x; echo no >&2; pwd > f; cat f"], stdin=b"hi\n")
    )
    assert outcome.stdout.startswith(b"hi\n/") and outcome.stderr == b"no\n"


def test_a_command_that_does_not_exist_is_not_the_programs_fault(plan):
    with pytest.raises(SandboxError, match="nothing-like-it"):
        asyncio.run(Sandbox(plan).run(["nothing-like-it"]))


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a//b", "a/"])
def test_a_file_is_laid_nowhere_else(name, plan):
    with pytest.raises(ValueError, match="scratch"):
        asyncio.run(Sandbox(plan).run("", files={name: b""}))


def test_many_run_side_by_side_and_do_not_meet(plan):
    program = "import os\nprint(input(), sorted(os.listdir('.')), os.path.exists(f'{input()}'))\nopen(input(), 'w')"
    sandbox = Sandbox(plan, concurrency=3)

    async def all_of_them() -> list[bytes]:
        runs = [sandbox.run(program, stdin=f"{n}\nf{n - 1}\nf{n}\n".encode()) for n in range(8)]
        return [outcome.stdout for outcome in await asyncio.gather(*runs)]

    assert asyncio.run(all_of_them()) == [f"{n} ['main.py'] False\n".encode() for n in range(8)]


def test_no_more_run_at_a_time_than_asked(plan, monkeypatch):
    running, most = 0, 0
    start = asyncio.create_subprocess_exec

    async def counted(*args, **named):
        nonlocal running, most
        process = await start(*args, **named)
        running, most = running + 1, max(most, running + 1)
        wait = process.wait

        async def waited():
            nonlocal running
            code = await wait()
            running -= 1
            return code

        process.wait = waited
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
    sandbox = Sandbox(plan, concurrency=2)

    async def all_of_them() -> None:
        await asyncio.gather(*(sandbox.run("") for _ in range(5)))

    asyncio.run(all_of_them())
    assert most == 2 and running == 0


def test_the_same_program_prints_the_same(plan):
    program = "print({str(n) for n in range(50)})"
    sandbox = Sandbox(plan)

    async def twice() -> set[bytes]:
        return {(await sandbox.run(program)).stdout for _ in range(2)}

    assert len(asyncio.run(twice())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")
def test_root_makes_the_program_another_user_without_namespaces(found, plan):
    if not found.landlock:
        pytest.skip("no Landlock here")
    sandbox = Sandbox(IsolationPlan(landlock=found.landlock, seccomp=True, apart=True))
    done = asyncio.run(sandbox.run(["/bin/sh", "-c", "id -u; id -G; echo $$ > mine; cat mine"], limits=SandboxLimits()))
    uid, groups, _ = done.stdout.decode().split()
    assert uid == groups != "0" and int(uid) > 1000


def test_a_supervisor_that_breaks_is_told_of(plan, monkeypatch):
    broken = [sys.executable, "-I", "-S", "-c", "raise RuntimeError('broken')"]
    monkeypatch.setattr("miles.rollout.sandbox.isolation.supervisor_command", lambda module: broken)
    with pytest.raises(SandboxError, match="broken"):
        asyncio.run(Sandbox(plan).run("print(1)"))
