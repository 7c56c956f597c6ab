"""SWE-bench tasks as an environment: a repository at a commit, tools to work on it, and hidden tests that grade it.

::

    open    git archive of base_commit ─► workspace      test_patch on a second copy ─► the test files, kept outside
    step    shell and files in the sandbox, on the workspace
    end     workspace + test files ─► test command in the sandbox ─► FAIL_TO_PASS and PASS_TO_PASS by swebench
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.types import BadLabel, GradingError
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import MIB
from miles.rollout.tools.code import CodeRunner, build_python_tool, build_shell_tool
from miles.rollout.tools.environment import OpenResult, SandboxContext, StepResult, ToolEnvironment
from miles.rollout.tools.files import build_file_tools
from miles.rollout.tools.tool import EnvironmentFailed, Message, Tool, ToolStats
from miles.rollout.tools.workspace import Workspace, temporary_workspace

_GRADE = "miles.rollout.reward.swebench:grade_log"
_ROW_KEYS = ("instance_id", "repo", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_FOLDER = "work"
_MAX_FILES = 100_000
_GIT_SECONDS = 600.0
_GRADE_SECONDS = 120.0
_GRADE_MEMORY = 64 << 30  # of address space
_PATHS = re.compile(r"^diff --git a/(.+) b/(.+)$", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PYTEST = "{python} -m pytest -rA --tb=no -p no:cacheprovider {tests}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweBenchTask:
    """A row of SWE-bench's format; ``log_parser`` names one of the package's parsers of test logs."""

    instance_id: str
    repo: str
    base_commit: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    log_parser: str
    eval_type: str

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files that the test patch changes or adds."""
        return tuple(dict.fromkeys(new for _, new in _PATHS.findall(self.test_patch)))


def parse_swebench_row(prompt: Prompt, log_parser: str) -> SweBenchTask:
    """The task in a prompt's metadata; ``log_parser`` is that of rows that name none."""
    row = prompt.metadata
    if missing := [key for key in _ROW_KEYS if key not in row]:
        raise DataError(
            f"Prompt {prompt.id}: metadata has no {missing[0]}, which SWE-bench's format has; convert rows with "
            "python -m miles.rollout.data.swebench."
        )
    if not _COMMIT.fullmatch(str(row["base_commit"])):
        raise DataError(f"Prompt {prompt.id}: base_commit must be the hash of a commit, and is {row['base_commit']!r}.")
    return SweBenchTask(
        instance_id=str(row["instance_id"]),
        repo=str(row["repo"]),
        base_commit=str(row["base_commit"]),
        test_patch=str(row["test_patch"] or ""),
        fail_to_pass=_parse_tests(prompt, "FAIL_TO_PASS"),
        pass_to_pass=_parse_tests(prompt, "PASS_TO_PASS"),
        log_parser=str(row.get("log_parser") or log_parser),
        eval_type=str(row.get("eval_type") or "pass_and_fail"),
    )


def _parse_tests(prompt: Prompt, key: str) -> tuple[str, ...]:
    """A list of tests, which most datasets hold as JSON text."""
    tests = prompt.metadata[key]
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except ValueError as error:
        raise DataError(f"Prompt {prompt.id}: {key} is not JSON ({error}).") from error
    if not isinstance(tests, Sequence) or not all(isinstance(test, str) for test in tests):
        raise DataError(f"Prompt {prompt.id}: {key} must be a list of tests, and is {tests!r}.")
    return tuple(tests)


class SweBenchEnvironment:
    """A prompt whose metadata is a row of SWE-bench's format.

    ``repositories`` is a folder of git clones, named ``owner/name`` or ``owner__name``. ``test_command`` runs the
    tests, with ``{python}`` and ``{tests}`` (the files of the test patch) filled in. ``workspace_mib`` bounds the
    repository, and ``test_seconds`` a test run.
    """

    def __init__(
        self,
        *,
        repositories: str,
        context: SandboxContext,
        test_command: str = _PYTEST,
        log_parser: str = "parse_log_pytest",
        workspace_mib: int = 256,
        test_seconds: float = 1800.0,
        python_tool: bool = False,
    ) -> None:
        if find_spec("swebench") is None:
            raise UsageError(
                "The environment swebench needs swebench, which is not installed; pip install 'miles-rl[swebench]'."
            )
        self._repositories = Path(repositories)
        self._context = context
        self._test_command = test_command
        self._log_parser = log_parser
        self._max_bytes = workspace_mib * MIB
        self._test_seconds = test_seconds
        self._python_tool = python_tool
        self._tools = ToolEnvironment(self._open_tools, context.tool_limits)
        self._task: SweBenchTask | None = None
        self._workspace: Workspace | None = None
        self._tests: Mapping[str, bytes | None] = {}

    @property
    def stats(self) -> ToolStats:
        return self._tools.stats

    async def open(self, prompt: Prompt) -> OpenResult:
        self._task = parse_swebench_row(prompt, self._log_parser)
        opened = await self._tools.open(prompt)
        return OpenResult(messages=opened.messages, tools=opened.tools, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        result = await self._tools.step(reply)
        if not result.done:
            return result
        report = await self._grade()
        parts = {key: float(report[key]) for key in ("fail_to_pass", "pass_to_pass")}
        return StepResult(reward=float(report["resolved"]), parts=parts, done=True, limit=result.limit)

    async def close(self) -> None:
        await self._tools.close()

    async def _open_tools(self, prompt: Prompt, stack: AsyncExitStack) -> list[Tool]:
        assert self._task is not None
        repository = self._find_repository(prompt, self._task.repo)
        self._workspace = stack.enter_context(temporary_workspace(self._max_bytes, _MAX_FILES))
        self._tests = await asyncio.to_thread(_check_out, repository, self._task, self._workspace.root)
        limits = self._context.code_limits
        runner = CodeRunner(
            self._context.sandbox(),
            self._workspace,
            limits._replace(scratch=max(limits.scratch, 2 * self._max_bytes)),
            max_file_bytes=self._max_bytes,
        )
        python = [build_python_tool(runner)] if self._python_tool else []
        return [build_shell_tool(runner), *python, *build_file_tools(self._workspace)]

    def _find_repository(self, prompt: Prompt, name: str) -> Path:
        for place in (self._repositories / name, self._repositories / name.replace("/", "__")):
            if place.is_dir():
                return place
        raise DataError(
            f"Prompt {prompt.id}: there is no clone of {name} in {self._repositories}; make one with git clone "
            f"https://github.com/{name} {self._repositories / name.replace('/', '__')}."
        )

    async def _grade(self) -> Mapping[str, Any]:
        """Run the tests on a copy of the workspace, with the test files as the test patch has them."""
        assert self._task is not None and self._workspace is not None
        sandbox, task = self._context.sandbox(), self._task
        files: dict[str, bytes] = dict(self._workspace.contents())
        for name, body in self._tests.items():
            files.pop(name, None)
            if body is not None:
                files[name] = body
        tests = " ".join(shlex.quote(name) for name in task.test_files if self._tests.get(name) is not None)
        command = self._test_command.replace("{python}", shlex.quote(sandbox.python)).replace("{tests}", tests)
        limits = self._context.code_limits
        limits = limits._replace(
            wall=self._test_seconds,
            cpu=self._test_seconds,
            scratch=max(limits.scratch, 2 * self._max_bytes),
            output=max(limits.output, 16 * MIB),
        )
        try:
            outcome = await sandbox.run(
                ["/bin/sh", "-c", f"cd {_FOLDER} && {{ {command}\n}} 2>&1"],
                limits=limits,
                files={f"{_FOLDER}/{name}": body for name, body in files.items()},
            )
            text = outcome.stdout.decode(errors="replace")
            status = 1 if outcome.exit is None else outcome.exit
            row = {
                "instance_id": task.instance_id,
                "repo": task.repo,
                "FAIL_TO_PASS": task.fail_to_pass,
                "PASS_TO_PASS": task.pass_to_pass,
                "log_parser": task.log_parser,
                "eval_type": task.eval_type,
            }
            return await _shared_pool().call(_GRADE, text, status, row)
        except BadLabel as error:
            raise DataError(f"{task.instance_id} cannot be graded: {error}.") from error
        except (SandboxError, GradingError) as error:
            raise EnvironmentFailed(str(error)) from error


def _check_out(repository: Path, task: SweBenchTask, folder: Path) -> dict[str, bytes | None]:
    """Extract the base commit to ``folder``; the files of the test patch after it, None for one that it deletes.

    The patch is applied to another copy, before the policy has written anything: git never sees the policy's files.
    """
    archive = _git("-C", str(repository), "archive", "--format=tar", task.base_commit)
    _extract(archive, folder)
    if not task.test_patch.strip():
        return {}
    with tempfile.TemporaryDirectory(prefix="miles-swebench-") as copy:
        _extract(archive, Path(copy))
        _git("apply", "--whitespace=nowarn", "-", folder=copy, stdin=task.test_patch.encode())
        names = dict.fromkeys(name for pair in _PATHS.findall(task.test_patch) for name in pair)
        return {name: path.read_bytes() if (path := Path(copy, name)).is_file() else None for name in names}


def _extract(archive: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def _git(*arguments: str, folder: str | None = None, stdin: bytes = b"") -> bytes:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": tempfile.gettempdir(), "GIT_TERMINAL_PROMPT": "0"}
    verb = arguments[0 if folder else 2]
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            input=stdin,
            capture_output=True,
            check=False,
            env=environment,
            timeout=_GIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"git {verb} took longer than {_GIT_SECONDS:g} s") from error
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[0]
        raise EnvironmentFailed(f"git {verb} failed: {said}")
    return done.stdout


@cache
def _shared_pool() -> GraderPool:
    """One process that parses logs, shared by all trajectories."""
    return GraderPool(1, seconds=_GRADE_SECONDS, memory=_GRADE_MEMORY)
