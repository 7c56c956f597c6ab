"""The tools python and shell run within the limits of the code options."""

import asyncio
import re
from contextlib import AsyncExitStack

import pytest
from tests.launch.small_run import write_inputs

from miles.core.errors import UsageError
from miles.core.types import Prompt
from miles.launch.build.generation import build_generation, build_hook_worker, build_tool_environments
from miles.launch.build.policies import read_policies
from miles.launch.read_config import read
from miles.rollout.sandbox import isolation, run
from miles.rollout.tools.tool import ToolError

TOOLS = ("--num-rollout", "1", "--rm-type", "math", "--label-key", "label", "--generate-tools", "python", "shell")
MULTI_TURN = ("--custom-generate-function-path", "multi_turn", "--apply-chat-template", "--device", "cpu")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    line = ["--hf-checkpoint", str(inputs), "--prompt-data", str(inputs / "train.jsonl"), *TOOLS, *MULTI_TURN]

    def build(*more: str):
        config, _, _ = read("train", [*line, "--n-samples-per-prompt", "2", *more])
        return build_tool_environments(config, build_hook_worker(config, print))

    build.line = line
    return build


async def call(environments, tool: str, **arguments: str) -> str:
    async with AsyncExitStack() as stack:
        tools = {tool.name: tool for tool in await environments._tools.open(Prompt(id=1, messages=()), stack)}
        return await tools[tool].call(arguments)


@pytest.fixture(autouse=True)
def _sandbox():
    try:
        isolation.plan_isolation(unsandboxed=False)
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("flags", "program", "why"),
    [
        (
            ("--code-memory-mib", "64"),
            "x = []\nwhile True: x.append(bytearray(1 << 20))",
            r"too much memory|MemoryError",
        ),
        (("--code-cpu-seconds", "0.3"), "while True: pass", r"more than 0\.3 seconds of CPU time"),
        (("--code-wall-seconds", "0.3"), "import time\ntime.sleep(1000)", r"more than 0\.3 seconds"),
        (("--tool-call-timeout", "0.5"), "import time\ntime.sleep(1000)", r"more than 0\.45 seconds"),
        (("--code-output-kib", "1"), "while True: print('x' * 100_000)", "wrote too much"),
        (("--code-scratch-mib", "1"), "open('f', 'wb').write(b'x' * (3 << 20))", "too large|No space|wrote too much"),
        (("--code-processes", "1"), "import os\nos.fork()\nos.fork()\nos.wait()", "too many|temporarily unavailable"),
    ],
)
def test_a_limit_of_code_ends_a_program_of_a_tool(build, flags, program, why):
    try:
        said = asyncio.run(call(build(*flags), "python", code=program))
    except ToolError as error:
        said = str(error)
    assert re.search(why, said), said


def test_as_many_programs_of_tools_run_at_once_as_the_option_says(build, monkeypatch):
    created = []
    monkeypatch.setattr(
        "miles.rollout.sandbox.build.create_sandbox",
        lambda **given: created.append(given) or run.create_sandbox(**given),
    )
    environments = build("--code-concurrency", "3", "--allow-unsandboxed-code")
    assert asyncio.run(call(environments, "shell", command="echo 1")) == "1"
    assert asyncio.run(call(environments, "shell", command="echo 2")) == "2"
    assert created == [{"unsandboxed": True, "concurrency": 3, "backend": "native"}]


def test_tools_and_the_code_reward_share_that_number(build, monkeypatch):
    created = []
    monkeypatch.setattr(
        "miles.rollout.sandbox.build.create_sandbox",
        lambda **given: created.append(given) or run.create_sandbox(**given),
    )
    config, plan, _ = read("train", [*build.line, "--rm-type", "code", "--code-concurrency", "3"])
    generation = build_generation(config, read_policies(config, plan).main.checkpoint)
    assert asyncio.run(call(generation.environments, "shell", command="echo 1")) == "1"
    asyncio.run(generation.close())
    assert [given["concurrency"] for given in created] == [3]
