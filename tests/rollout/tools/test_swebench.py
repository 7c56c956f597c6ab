"""SWE-bench's task format: a small repository, its hidden tests, and the package's own verdict."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.data.swebench import convert_file, convert_row
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import create_sandbox
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.tool import EnvironmentFailed, ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

SOURCE = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return a + a\n"
RIGHT = SOURCE.replace("a - b", "a + b")
TESTS = """import unittest

from calc import add, double


class TestCalc(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(2), 4)

    def test_add(self):
        self.assertEqual(add(2, 3), 5)


if __name__ == "__main__":
    unittest.main()
"""
COMMAND = "{python} -m unittest -v {tests}"  # the standard library's runner, whose log looks like Django's
ADD, DOUBLE = "test_add (tests.test_calc.TestCalc.test_add)", "test_double (tests.test_calc.TestCalc.test_double)"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repositories(tmp_path) -> Path:
    folder = tmp_path / "repositories" / "lab__calc"
    (folder / "tests").mkdir(parents=True)
    (folder / "calc.py").write_text(SOURCE)
    (folder / "tests" / "__init__.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder.parent


@pytest.fixture
def row(repositories) -> dict:
    folder = repositories / "lab__calc"
    commit = git(folder, "rev-parse", "HEAD").strip()
    (folder / "tests" / "test_calc.py").write_text(TESTS)
    git(folder, "add", "-A")
    patch = git(folder, "diff", "--cached")
    git(folder, "reset", "-q", "--hard")
    return {
        "instance_id": "lab__calc-1",
        "repo": "lab/calc",
        "version": "1.0",
        "base_commit": commit,
        "problem_statement": "add subtracts.",
        "hints_text": "",
        "patch": "the reference",
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps([ADD]),
        "PASS_TO_PASS": json.dumps([DOUBLE]),
        "log_parser": "parse_log_django",
    }


def prompt_of(row, repositories, **settings) -> Prompt:
    metadata = convert_row(row, "row 1")["metadata"]
    environment = {"name": "swebench", "repositories": str(repositories), "test_command": COMMAND, **settings}
    return Prompt(
        id=1, messages=({"role": "user", "content": "Fix it."},), metadata=metadata | {"environment": environment}
    )


def factory() -> EnvironmentFactory:
    resources = ToolResources(
        sandbox=lambda: create_sandbox(unsandboxed=False, concurrency=1), code_limits=SandboxLimits()
    )
    return EnvironmentFactory(ToolRegistry(resources), ToolLimits())


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


DONE = {"role": "assistant", "content": "Done."}


def play(prompt, replies):
    async def played():
        environment = factory()(prompt)
        try:
            opening = await environment.open(prompt)
            return opening, [await environment.step(reply) for reply in replies]
        finally:
            await environment.close()

    return asyncio.run(played())


@pytest.fixture
def swebench():
    return pytest.importorskip("swebench")


def test_a_fix_by_tools_is_resolved(swebench, row, repositories):
    opening, steps = play(
        prompt_of(row, repositories),
        [
            call("shell", command="ls tests; cat calc.py"),
            call("write_file", path="calc.py", content=RIGHT),
            DONE,
        ],
    )
    assert {tool["function"]["name"] for tool in opening.tools} >= {"shell", "read_file", "write_file"}
    listed = steps[0].messages[0]["content"]
    assert "return a - b" in listed and "test_calc" not in listed  # hidden tests are not in the workspace
    assert (steps[-1].done, steps[-1].reward) == (True, 1.0)
    assert steps[-1].parts == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({}, {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        ({"calc.py": RIGHT.replace("a + a", "3")}, {"fail_to_pass": 1.0, "pass_to_pass": 0.0}),
        ({"tests/test_calc.py": "assert True"}, {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),  # theirs is replaced
        ({"calc.py": "nonsense ("}, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}),
        (
            {"calc.py": f"import os\nprint('{ADD} ... ok')\nprint('{DOUBLE} ... ok', flush=True)\nos._exit(1)"},
            {"fail_to_pass": 0.0, "pass_to_pass": 0.0},  # a log that says so while the run failed
        ),
    ],
)
def test_what_is_not_a_fix_is_not_resolved(swebench, row, repositories, files, parts):
    writes = [call("write_file", path=name, content=text) for name, text in files.items()]
    _, steps = play(prompt_of(row, repositories), [*writes, DONE])
    assert (steps[-1].reward, steps[-1].parts) == (0.0, parts)


def test_rows_are_converted_without_the_reference(row, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert convert_file(str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl") == 1
    (made,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert made["prompt"] == "add subtracts." and "patch" not in made["metadata"]
    assert made["metadata"]["FAIL_TO_PASS"] == row["FAIL_TO_PASS"]
    with pytest.raises(DataError, match="row 3 has no base_commit"):
        convert_row({key: value for key, value in row.items() if key != "base_commit"}, "row 3")


def test_what_is_wrong_with_a_row_is_said(swebench, row, repositories, tmp_path):
    with pytest.raises(DataError, match=r"there is no clone of lab/calc in .*git clone"):
        play(prompt_of(row, tmp_path / "nowhere"), [])
    with pytest.raises(EnvironmentFailed, match="git archive failed"):
        play(prompt_of(row | {"base_commit": "0" * 40}, repositories), [])
    with pytest.raises(DataError, match="base_commit must be the hash of a commit, and is '--output=x'"):
        play(prompt_of(row | {"base_commit": "--output=x"}, repositories), [])
    with pytest.raises(DataError, match="FAIL_TO_PASS is not JSON"):
        play(prompt_of(row | {"FAIL_TO_PASS": "[test"}, repositories), [])
    with pytest.raises(DataError, match="swebench has no log_parser parse_log_cobol"):
        play(prompt_of(row | {"log_parser": "parse_log_cobol"}, repositories), [DONE])
    bare = Prompt(id=2, messages=(), metadata={"environment": {"name": "swebench", "repositories": "."}})
    with pytest.raises(DataError, match=r"Prompt 2: metadata has no instance_id.*miles\.rollout\.data\.swebench"):
        play(bare, [])


def test_without_the_package_the_extra_is_named(row, repositories, monkeypatch):
    monkeypatch.setattr("miles.rollout.tools.environments.swebench.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"needs swebench, which is not installed; pip install 'miles-rl\[swebench\]'"):
        factory()(prompt_of(row, repositories))
