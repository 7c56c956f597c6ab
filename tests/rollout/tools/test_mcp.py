"""MCP servers as tools: a server written from the specification, and one made with the official SDK."""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from miles.core.errors import UsageError
from miles.core.image_files import decode_image
from miles.core.media_store import MediaStore
from miles.rollout.tools.mcp import MCPServerConfig, MCPServers, read_mcp_config
from miles.rollout.tools.tool import EnvironmentFailed, Toolbox, ToolError, ToolLimits

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
ENVIRON = {"PATH": os.environ["PATH"], "SECRET_TOKEN": "do not tell"}


def server(**more) -> MCPServerConfig:
    return MCPServerConfig(**{"name": "small", "command": sys.executable, "args": (SCRIPT,), **more})


def using(work, tmp_path, media=None, **more):
    """Open the server's tools as a trajectory does, and work with them by name."""

    async def use():
        servers = MCPServers({"small": server(**more)}, environ=ENVIRON, media=media)
        try:
            async with AsyncExitStack() as stack:
                tools = {tool.name: tool for tool in await servers.open("small", stack, tmp_path)}
                return await work(tools)
        finally:
            await servers.close()

    return asyncio.run(use())


def test_tools_are_listed_page_by_page_and_called(tmp_path):
    async def work(tools):
        results = [await tools["add"].call({"a": 2, "b": 3}), await tools["everything"].call({})]
        with pytest.raises(ToolError, match="it cannot be done"):
            await tools["fail"].call({})
        return list(tools), tools["add"].spec, results

    names, spec, results = using(work, tmp_path)
    assert names == ["add", "fail", "die", "hang", "where", "everything", "picture", "cancelled", "answers"]
    assert spec["function"]["description"] == "Add two numbers." and spec["function"]["parameters"]["required"]
    assert results == ["5", "words\n[image: image/png]\na file\n[b: file:///b]"]


def test_images_of_a_result_are_parts_of_the_turn_if_the_model_reads_images(tmp_path):
    media = MediaStore()

    async def work(tools):
        box = Toolbox(list(tools.values()), ToolLimits())
        asked = [{"id": "1", "function": {"name": name, "arguments": "{}"}} for name in ("picture", "everything")]
        return [said["content"] for said in await box.answer(asked)]

    picture, everything = using(work, tmp_path, media)
    words, image = picture
    assert words == {"type": "text", "text": "a dot"} and image["type"] == "image"
    assert decode_image(media.get(image["image"])).size == (1, 1)
    assert everything.startswith("words\n[image: image/png, which is no image of a known format")
    assert using(work, tmp_path)[0] == "a dot\n[image: image/png]"


def test_a_server_of_a_trajectory_s_own_works_in_its_folder_and_sees_no_secrets(tmp_path):
    async def work(tools):
        return json.loads(await tools["here_where"].call({}))

    found = using(work, tmp_path, prefix="here_", env={"GIVEN": "1"}, tools=("where",))
    assert found["cwd"] == str(tmp_path)
    assert "GIVEN" in found["env"] and "SECRET_TOKEN" not in found["env"]
    assert not Path(f"/proc/{found['pid']}").exists()


def test_many_calls_may_be_under_way_at_once(tmp_path):
    async def work(tools):
        return await asyncio.gather(*(tools["add"].call({"a": i, "b": 1}) for i in range(50)))

    assert using(work, tmp_path) == [str(i + 1) for i in range(50)]


def test_a_call_that_is_given_up_is_called_off_and_the_server_goes_on(tmp_path):
    async def work(tools):
        box = Toolbox(list(tools.values()), ToolLimits(call_seconds=0.05))
        asked = {"id": "1", "function": {"name": "hang", "arguments": "{}"}}
        (said,) = await box.answer([asked])
        return said["content"], await tools["cancelled"].call({}), await tools["answers"].call({})

    said, cancelled, answers = using(work, tmp_path)
    assert "no answer within 0.05 seconds" in said and len(json.loads(cancelled)) == 1
    assert json.loads(answers) == [["mine", False], ["yours", True]]  # refused, and answered


def test_a_trajectory_s_own_server_that_ends_fails_the_trajectory(tmp_path):
    async def work(tools):
        with pytest.raises(EnvironmentFailed, match="small is gone: it ended: I am tired"):
            await tools["die"].call({})
        with pytest.raises(EnvironmentFailed, match="small ended"):
            await tools["add"].call({"a": 1, "b": 1})

    using(work, tmp_path)


def test_a_shared_server_that_ends_is_started_again_but_not_for_ever(tmp_path):
    async def work(tools):
        for _ in range(2):
            with pytest.raises(ToolError, match="its server ended"):
                await tools["die"].call({})
        first = await tools["add"].call({"a": 1, "b": 1})  # which makes it trusted again
        for _ in range(3):
            with pytest.raises(ToolError, match="its server ended"):
                await tools["die"].call({})
        with pytest.raises(EnvironmentFailed, match="3 times in a row"):
            await tools["add"].call({"a": 1, "b": 1})
        return first

    assert using(work, tmp_path, shared=True, restarts=2) == "2"


def test_a_shared_server_is_one_process_for_all_trajectories(tmp_path):
    async def use():
        servers = MCPServers({"small": server(shared=True)}, environ=ENVIRON)
        pids = []
        for _ in range(2):
            async with AsyncExitStack() as stack:
                tools = {tool.name: tool for tool in await servers.open("small", stack, tmp_path)}
                pids.append(json.loads(await tools["where"].call({}))["pid"])
        await servers.close()
        return pids

    one, two = asyncio.run(use())
    assert one == two and not Path(f"/proc/{one}").exists()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"command": "no-such-program-anywhere"}, "did not start: no-such-program-anywhere cannot be started"),
        ({"args": (SCRIPT, "1999-01-01")}, "did not do initialize: Unsupported protocol version"),
        ({"args": ("-c", "raise SystemExit('not today')")}, "did not do initialize: it ended: not today"),
        ({"args": ("-c", "import sys; sys.stdin.read()"), "seconds": 0.05}, "did not do initialize: no answer in time"),
    ],
)
def test_a_server_that_does_not_start_says_why(tmp_path, more, complaint):
    async def work(tools):
        raise AssertionError("there are none")

    with pytest.raises(EnvironmentFailed, match=complaint):
        using(work, tmp_path, **more)


def test_servers_are_read_from_the_file_other_programs_use(tmp_path):
    path = tmp_path / "mcp.json"
    entry = {"type": "stdio", "command": "npx", "args": ["-y", "server"], "env": {"A": "b"}, "shared": True}
    path.write_text(json.dumps({"mcpServers": {"files": entry}}))
    wanted = MCPServerConfig(name="files", command="npx", args=("-y", "server"), env={"A": "b"}, shared=True)
    assert read_mcp_config(path) == {"files": wanted}
    for bad in (
        "{",
        "{}",
        '{"mcpServers": {"web": {"url": "http://x"}}}',
        '{"mcpServers": {"a": {"command": "b", "x": 1}}}',
    ):
        path.write_text(bad)
        with pytest.raises(UsageError, match="does not list MCP servers"):
            read_mcp_config(path)


OFFICIAL_SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("official")

@server.tool()
def multiply(a: int, b: int) -> int:
    "Multiply two whole numbers."
    return a * b

@server.tool()
async def refuse(why: str) -> str:
    "Always fails."
    raise ValueError(why)

server.run()
"""


def test_the_official_packages_server_is_understood(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(OFFICIAL_SERVER)

    async def work(tools):
        with pytest.raises(ToolError, match="refuse"):
            await tools["refuse"].call({"why": "not today"})
        with pytest.raises(ToolError):
            await tools["multiply"].call({"a": "x"})
        return tools["multiply"].spec["function"], await tools["multiply"].call({"a": 6, "b": 7})

    about, result = using(work, tmp_path, args=(str(script),))
    assert about["description"] == "Multiply two whole numbers." and result == "42"
    assert about["parameters"]["properties"]["a"]["type"] == "integer"
