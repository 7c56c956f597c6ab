"""From flags to tools and environments, with a sentence for each mistake."""

import asyncio
import json
from contextlib import AsyncExitStack
from types import ModuleType

import pytest

from miles.core.errors import MilesError
from miles.core.types import Prompt
from miles.rollout.generate.multi_turn import TurnLimits, turn_limits_from_config
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.tools.build import build_environments, build_tool_limits
from miles.rollout.tools.config import ToolsConfig
from miles.rollout.tools.environment import ToolAugmentedEnvironment, ToolEnvironment
from miles.rollout.tools.tool import ToolLimits

OWN = """
SPECS = [{"type": "function", "function": {"name": "ask", "parameters": {"type": "object", "properties": {}}}}]

async def execute(name, params):
    return name

async def double(x: int) -> str:
    "Twice x."
    return str(2 * x)

def plain(name, params):
    return name

class Environment:
    def __init__(self, level=1):
        self.level = level
    async def open(self, prompt): ...
    async def step(self, reply): ...
    async def close(self): ...
"""


@pytest.fixture
def own(monkeypatch):
    module = ModuleType("own_tools")
    exec(OWN, module.__dict__)
    monkeypatch.setitem(__import__("sys").modules, "own_tools", module)
    return module


def env(prompt_metadata=None, **knobs):
    environments = build_environments(ToolsConfig(**knobs), sandbox=None, code_limits=SandboxLimits(), environ={})
    return environments(Prompt(id=1, messages=({"role": "user", "content": "?"},), metadata=prompt_metadata or {}))


def offered(made):
    async def names():
        opening = await made.open(Prompt(id=1, messages=()))
        await made.close()
        return [tool["function"]["name"] for tool in opening.tools]

    return asyncio.run(names())


def test_defaults_of_the_knobs_are_those_of_the_limits():
    assert build_tool_limits(ToolsConfig()) == ToolLimits()
    assert turn_limits_from_config(ToolsConfig()) == TurnLimits()


def test_tools_are_built_in_ones_and_the_users_own(own, tmp_path):
    documents = tmp_path / "documents.jsonl"
    documents.write_text(json.dumps({"text": "a"}))
    assert offered(env()) == []
    assert offered(env(generate_tools=("calculator", "own_tools:double"))) == ["calculator", "double"]
    assert offered(env(generate_tools=("search",), search_documents=str(documents))) == ["search"]
    pair = {
        "generate_tool_specs_path": "own_tools.SPECS",
        "generate_execute_tool_function_path": "own_tools:execute",
    }
    assert offered(env(**pair)) == ["ask"]


def test_a_world_of_the_users_own_may_have_settings(own):
    assert isinstance(env(), ToolEnvironment)
    assert env(generate_environment="own_tools:Environment").level == 1
    asked = json.dumps({"name": "own_tools:Environment", "level": 3})
    assert env(generate_environment=asked).level == 3
    assert isinstance(env(generate_environment=asked, generate_tools=("calculator",)), ToolAugmentedEnvironment)


@pytest.mark.parametrize(
    ("knobs", "complaint"),
    [
        ({"generate_tools": ("calculater",)}, "did you mean calculator"),
        ({"generate_tools": ("python",)}, "needs the sandbox"),
        ({"generate_tools": ("mcp:files",)}, "There is no MCP server files"),
        ({"generate_tools": ("own_tools:nothing",)}, "own_tools has no nothing"),
        ({"generate_tools": ("own_tools:plain",)}, "a tool is an async function"),
        ({"generate_tool_specs_path": "own_tools:SPECS"}, "belong together"),
        (
            {
                "generate_tool_specs_path": "own_tools:SPECS",
                "generate_execute_tool_function_path": "own_tools:plain",
            },
            "write async def",
        ),
        (
            {
                "generate_tool_specs_path": "own_tools:double",
                "generate_execute_tool_function_path": "own_tools:execute",
            },
            "must be a list of specs",
        ),
        ({"generate_environment": "own_tools:double"}, "not a class with open, step and close"),
        ({"generate_environment": "{"}, "is not a JSON object"),
        ({"generate_environment": "{}"}, "has no name"),
        ({"generate_environment": "texarena"}, "is not a built-in"),
        ({"search_documents": "/nowhere.jsonl"}, "cannot be read"),
        ({"mcp_servers": "/nowhere.json"}, "cannot be read"),
    ],
)
def test_every_mistake_has_its_sentence(own, knobs, complaint):
    with pytest.raises(MilesError, match=complaint):
        env(**knobs)


def test_the_shared_things_of_a_run_are_opened_for_every_trajectory(tmp_path):
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"x": {"command": "true"}}}))
    environments = build_environments(
        ToolsConfig(generate_tools=("mcp:x",), mcp_servers=str(path)),
        sandbox=None,
        code_limits=SandboxLimits(),
        environ={},
    )

    async def opens():
        async with AsyncExitStack() as stack:
            made = environments(Prompt(id=1, messages=()))
            stack.push_async_callback(made.close)
            await made.open(Prompt(id=1, messages=()))

    with pytest.raises(Exception, match="MCP server x did not do initialize"):
        asyncio.run(opens())
