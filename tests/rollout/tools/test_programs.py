"""Python and shell in the sandbox, on the attempt's files."""

import asyncio

import pytest

from miles.rollout.sandbox.limits import Limits
from miles.rollout.sandbox.run import sandbox_here
from miles.rollout.tools.folder import folder
from miles.rollout.tools.programs import Programs, python, shell
from miles.rollout.tools.tool import ToolError


@pytest.fixture(scope="module")
def sandbox():
    return sandbox_here(unsandboxed=False, concurrency=2)


@pytest.fixture
def desk(sandbox):
    with folder() as place:
        programs = Programs(sandbox, place, Limits(wall=20.0, output=1 << 12))
        yield place, python(programs), shell(programs)


def test_files_pass_from_call_to_call_and_from_tool_to_tool(desk):
    place, python, shell = desk
    place.write("given.txt", b"7 6")
    code = "a, b = map(int, open('given.txt').read().split())\nprint(a * b, file=open('out/made.txt', 'w'))"

    async def work():
        return [
            await shell.call({"command": "mkdir out; echo old > out/gone.txt; ls"}),
            await python.call({"code": code}),
            await shell.call({"command": "cat out/made.txt; rm out/gone.txt"}),
        ]

    assert asyncio.run(work()) == ["given.txt\nout", "[no output]", "42"]
    assert place.contents() == {"given.txt": b"7 6", "out/made.txt": b"42\n"}


def test_what_goes_wrong_is_told_with_what_was_said_before(desk):
    place, python, shell = desk

    async def work():
        failed = await python.call({"code": "print('so far')\nraise ValueError('no')"})
        status = await shell.call({"command": "ls /nowhere; exit 3"})
        with pytest.raises(ToolError) as loud:
            await python.call({"code": "while True: print('x' * 100000)"})
        network = await python.call({"code": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"})
        return failed, status, str(loud.value), network

    failed, status, loud, network = asyncio.run(work())
    assert failed.startswith("so far\n") and "ValueError: no\n[exit status 1]" in failed
    assert "/nowhere" in status and status.endswith("[exit status 3]")
    assert loud.startswith("the program was ended: it wrote too much") and len(loud) < 1 << 13
    assert "[exit status 1]" in network and "Error" in network
    assert place.contents() == {}


def test_a_program_that_never_ends_is_ended(sandbox):
    with folder() as place:
        programs = Programs(sandbox, place, Limits(wall=0.5, cpu=5.0))
        with pytest.raises(ToolError, match=r"it took more than 0\.5 seconds"):
            asyncio.run(python(programs).call({"code": "import time\ntime.sleep(1000)"}))


def test_links_and_the_program_itself_are_not_kept(desk):
    place, _, shell = desk
    asyncio.run(shell.call({"command": "ln -s /etc/passwd link; echo x > real"}))
    assert place.names() == ["real"]
