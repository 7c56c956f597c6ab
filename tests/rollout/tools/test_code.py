"""Python and shell in the sandbox, on the trajectory's files."""

import asyncio

import pytest

from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import create_sandbox
from miles.rollout.tools.code import CodeRunner, build_python_tool, build_shell_tool
from miles.rollout.tools.tool import ToolError
from miles.rollout.tools.workspace import temporary_workspace


@pytest.fixture(scope="module")
def sandbox():
    return create_sandbox(unsandboxed=False, concurrency=2)


@pytest.fixture
def server(sandbox):
    with temporary_workspace() as place:
        programs = CodeRunner(sandbox, place, SandboxLimits(wall=20.0, output=1 << 12))
        yield place, build_python_tool(programs), build_shell_tool(programs)


def test_files_pass_from_call_to_call_and_from_tool_to_tool(server):
    place, build_python_tool, build_shell_tool = server
    place.write("given.txt", b"7 6")
    code = "a, b = map(int, open('given.txt').read().split())\nprint(a * b, file=open('out/made.txt', 'w'))"

    async def work():
        return [
            await build_shell_tool.call({"command": "mkdir out; echo old > out/gone.txt; ls"}),
            await build_python_tool.call({"code": code}),
            await build_shell_tool.call({"command": "cat out/made.txt; rm out/gone.txt"}),
        ]

    assert asyncio.run(work()) == ["given.txt\nout", "[no output]", "42"]
    assert place.contents() == {"given.txt": b"7 6", "out/made.txt": b"42\n"}


def test_what_goes_wrong_is_told_with_what_was_said_before(server):
    place, build_python_tool, build_shell_tool = server

    async def work():
        failed = await build_python_tool.call({"code": "print('so far')\nraise ValueError('no')"})
        status = await build_shell_tool.call({"command": "ls /nowhere; exit 3"})
        with pytest.raises(ToolError) as loud:
            await build_python_tool.call({"code": "while True: print('x' * 100000)"})
        network = await build_python_tool.call({"code": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"})
        return failed, status, str(loud.value), network

    failed, status, loud, network = asyncio.run(work())
    assert failed.startswith("so far\n") and "ValueError: no\n[exit status 1]" in failed
    assert "/nowhere" in status and status.endswith("[exit status 3]")
    assert loud.startswith("the program was ended: it wrote too much") and len(loud) < 1 << 13
    assert "[exit status 1]" in network and "Error" in network
    assert place.contents() == {}


def test_a_program_that_never_ends_is_ended(sandbox):
    with temporary_workspace() as place:
        programs = CodeRunner(sandbox, place, SandboxLimits(wall=0.5, cpu=5.0))
        with pytest.raises(ToolError, match=r"it took more than 0\.5 seconds"):
            asyncio.run(build_python_tool(programs).call({"code": "import time\ntime.sleep(1000)"}))


def test_links_and_the_program_itself_are_not_kept(server):
    place, _, build_shell_tool = server
    asyncio.run(build_shell_tool.call({"command": "ln -s /etc/passwd link; echo x > real"}))
    assert place.names() == ["real"]
