"""Calls are parsed, checked, timed and cut; users' own functions are tools; sandboxes and environments have names."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import DataError, HookError, UsageError
from miles.core.types import Prompt
from miles.rollout.tools.calculator import build_calculator_tool
from miles.rollout.tools.custom import tool_from_function, tools_from_specs
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.environment import OpenResult, StepResult, ToolAugmentedEnvironment, ToolEnvironment
from miles.rollout.tools.search import BM25Index, Document
from miles.rollout.tools.tool import (
    EnvironmentFailed,
    Tool,
    Toolbox,
    ToolError,
    ToolLimits,
    parse_arguments,
    truncate_middle,
)
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

PROMPT = Prompt(id=3, messages=({"role": "user", "content": "Go."},))
LIMITS = ToolLimits()


def asked(name, arguments="{}", id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answers(tools, *calls, limits=LIMITS):
    box = Toolbox(tools, limits)
    return asyncio.run(box.answer(calls)), box.stats


def made(name, call):
    return Tool(name=name, description="", parameters={"type": "object", "properties": {}}, call=call)


async def echo(
    text: str, times: int = 1, mode: Literal["plain", "loud"] = "plain", tags: list[str] | None = None
) -> str:
    """Say it again.

    As often as you like.
    """
    return (text.upper() if mode == "loud" else text) * times


def test_calls_are_answered_in_their_order_with_their_ids():
    tools = [build_calculator_tool(), tool_from_function(echo, "echo")]
    said, tally = answers(
        tools, asked("echo", '{"text": "a", "times": 3}', "x"), asked("calculator", '{"expression": "2+2"}', "y")
    )
    assert said == [
        {"role": "tool", "tool_call_id": "x", "name": "echo", "content": "aaa"},
        {"role": "tool", "tool_call_id": "y", "name": "calculator", "content": "4"},
    ]
    assert (tally.calls, tally.failures) == (2, 0)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("{", "are not JSON"),
        ("[1]", "must be one JSON object"),
        ("{}", "the argument text is missing"),
        ('{"text": 5}', "text must be of type string"),
        ('{"text": "a", "times": true}', "times must be of type integer"),
        ('{"text": "a", "times": 1.5}', "times must be of type integer"),
        ('{"text": "a", "mode": "quiet"}', "mode must be one of plain, loud"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_are_text_to_the_model(arguments, complaint):
    (said,), tally = answers([tool_from_function(echo, "echo")], asked("echo", arguments))
    assert said["content"].startswith("Error: ") and complaint in said["content"] and tally.failures == 1


def test_a_tool_that_raises_is_text_and_a_world_that_breaks_is_not():
    async def crash(arguments):
        raise KeyError("lost")

    async def broken(arguments):
        raise EnvironmentFailed("no electricity")

    async def wrong(arguments):
        return 5

    (said,), _ = answers([made("crash", crash)], asked("crash"))
    assert said["content"] == "Error: crash failed with KeyError: 'lost'."
    with pytest.raises(EnvironmentFailed):
        answers([made("broken", broken)], asked("broken"))
    with pytest.raises(HookError, match="The tool wrong gave a int; return text"):
        answers([made("wrong", wrong)], asked("wrong"))


def test_a_turn_has_only_so_many_calls():
    calls = [asked("calculator", '{"expression": "1"}', str(i)) for i in range(4)]
    said, _ = answers([build_calculator_tool()], *calls, limits=ToolLimits(calls_per_turn=2))
    assert [message["content"] for message in said] == ["1", "1"] + [
        "Error: only 2 calls are answered in one turn."
    ] * 2


@given(st.text(), st.integers(1, 50))
def test_results_are_cut_in_the_middle_and_say_by_how_much(text, most):
    said = truncate_middle(text, most)
    assert said == text if len(text) <= most else f"[... {len(text) - most} characters left out ...]" in said
    kept = said.split(f"\n[... {len(text) - most} characters left out ...]\n", 1)
    assert text.startswith(kept[0]) and text.endswith(kept[-1])


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_no_arguments_make_the_parser_fail_otherwise_than_by_telling(value):
    for arguments in (value, json.dumps(value)):
        with suppress(ToolError):
            assert isinstance(parse_arguments(arguments, build_calculator_tool().parameters), dict)


def test_a_function_becomes_a_tool_with_its_schema():
    tool = tool_from_function(echo, "echo")
    assert tool.description == "Say it again.\n\nAs often as you like."
    assert tool.parameters["required"] == ["text"]
    assert tool.parameters["properties"]["mode"] == {"enum": ["plain", "loud"]}
    assert tool.parameters["properties"]["tags"] == {"type": "array"}

    async def untyped(x):
        return ""

    def plain(x: str) -> str:
        return x

    async def odd(x: complex) -> str:
        return ""

    for bad, complaint in ((untyped, "needs a name and a type"), (plain, "an async function"), (odd, "has the type")):
        with pytest.raises(HookError, match=complaint):
            tool_from_function(bad, "it")


def test_specs_with_one_function_that_runs_them_are_tools():
    async def execute(name, params):
        return f"{name} {params}"

    spec = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    (tool,) = tools_from_specs([spec], execute, "--generate-tool-specs-path")
    assert asyncio.run(tool.call({"a": 1})) == "f {'a': 1}"
    with pytest.raises(HookError, match="a spec must be"):
        tools_from_specs([{"name": "f"}], execute, "it")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(HookError, match="Two tools are called calculator"):
        Toolbox([build_calculator_tool(), build_calculator_tool()], LIMITS)


def opened(box, **metadata):
    async def names():
        async with AsyncExitStack() as stack:
            prompt = Prompt(id=3, messages=PROMPT.messages, metadata=metadata)
            return [tool.name for tool in await box.open(prompt, stack)]

    return asyncio.run(names())


def test_a_box_opens_what_is_asked_for():
    index = BM25Index([Document(id="a", title="", text="x")])
    box = ToolRegistry(ToolResources(index=index, custom={"echo": tool_from_function(echo, "echo")}), ["calculator"])
    assert opened(box) == ["calculator"]
    assert opened(box, tools="search, echo") == ["search", "echo"]
    assert opened(box, tools=["files", "files"]) == ["read_file", "write_file", "list_files", "grep"]
    assert opened(box, tools=[]) == []
    for tools in (["python"], ["mcp:x"], ["nothing"], 5, {"a": 1}):
        with pytest.raises(DataError, match="Prompt 3"):
            opened(box, tools=tools)
    with pytest.raises(DataError, match="must map file names to texts"):
        opened(box, tools=["files"], files=["a"])
    with pytest.raises(DataError, match="is not a path inside the workspace"):
        opened(box, tools=["files"], files={"../a": "b"})
    with pytest.raises(UsageError, match="needs documents"):
        ToolRegistry(ToolResources(), ["search"])


class Asking:
    """An environment that asks for a number."""

    def __init__(self, wanted: int = 0):
        self.wanted = wanted

    async def open(self, prompt):
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply):
        return StepResult(reward=float(reply["content"] == str(self.wanted)), done=True)

    async def close(self):
        return


def test_environments_are_chosen_by_name_and_may_have_tools_besides():
    environments = EnvironmentFactory(ToolRegistry(ToolResources()), LIMITS, custom={"asking": Asking})

    def env(**metadata):
        return environments(Prompt(id=3, messages=PROMPT.messages, metadata=metadata))

    assert isinstance(env(), ToolEnvironment)
    asking = env(environment={"name": "asking", "wanted": 4})
    assert isinstance(asking, Asking) and asking.wanted == 4

    async def play():
        both = env(environment={"name": "asking", "wanted": 4}, tools=["calculator"])
        assert isinstance(both, ToolAugmentedEnvironment)
        opening = await both.open(Prompt(id=3, messages=PROMPT.messages, metadata={"tools": ["calculator"]}))
        said = await both.step({"content": "", "tool_calls": [asked("calculator", '{"expression": "2+2"}')]})
        end = await both.step({"content": said.messages[0]["content"]})
        await both.close()
        return opening, end

    opening, end = asyncio.run(play())
    assert opening.provides_reward and opening.tools[0]["function"]["name"] == "calculator"
    assert end.done and end.reward == 1.0
    for bad in ("askin", {"wanted": 4}, {"name": "asking", "other": 1}, 7):
        with pytest.raises(DataError, match="Prompt 3"):
            env(environment=bad)
