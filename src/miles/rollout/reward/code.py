"""The ``code`` reward: does the program in the reply pass the prompt's tests? Run in the sandbox.

Where the tests are found, and what each kind looks like::

    label  {"tests": [{"input": "1 2", "output": "3"}, ...]}   the program reads stdin and writes stdout
           {"inputs": ["1 2", ...], "outputs": ["3", ...]}      the same
           {"tests": ["assert add(1, 2) == 3", ...]}            statements, run after the program
           assert add(1, 2) == 3                                (text that is no JSON object) the same, as one test
           {"prompt": ..., "test": ..., "entry_point": ...}     HumanEval's fields; also in the prompt's metadata
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.config import RolloutConfig
from miles.rollout.reward.reply import reply_of
from miles.rollout.reward.score import BadLabel, GradingError
from miles.rollout.sandbox import harness
from miles.rollout.sandbox.limits import MIB, Limits, Outcome, SandboxError
from miles.rollout.sandbox.run import sandbox_here

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "py", "python3")
_HUMAN_EVAL = ("test", "entry_point")
_WHY = {  # a limit a program ran into, as the part of the reward it is counted under
    "wall": "timed_out",
    "cpu": "timed_out",
    "memory": "out_of_memory",
    "output": "too_much_output",
    "processes": "too_many_processes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Tests by example: what goes in, what must come out."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """Tests as Python that must not raise. ``before`` stands above the program; a reply that does not define
    ``entry_point`` goes on where it ends."""

    statements: tuple[str, ...]
    before: str = ""
    entry_point: str = ""


Tests = Pairs | Statements


class CodeReward:
    """1 when all tests pass, else 0 (see core.protocols.RewardFn).

    ``parts``: ``passed``, the share of tests that did; ``tests``, their number; and when not all passed, why the first
    that failed did, as one more part with the value 1: ``no_code``, ``wrong``, ``crashed``, ``timed_out``,
    ``out_of_memory``, ``too_much_output`` or ``too_many_processes``. A program that ran out of time once is
    not run again, and its other tests count as failed. Making one finds out whether this machine can hold a
    sandbox; UsageError if not, unless ``unsandboxed``.
    """

    def __init__(self, limits: Limits, unsandboxed: bool, *, concurrency: int = 8) -> None:
        self._limits = limits
        self._sandbox = sandbox_here(unsandboxed=unsandboxed, concurrency=concurrency)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = reply_of("code", trajectory)
        try:
            tests = tests_of(prompt)
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by code: {error}.") from error
        program = program_of(reply)
        try:
            if isinstance(tests, Pairs):
                reasons = await self._by_example(program, tests)
            else:
                reasons = await self._by_statements(program, tests)
        except SandboxError as error:
            raise GradingError(str(error)) from error
        return _reward(reasons)

    async def _by_example(self, program: str, tests: Pairs) -> list[str]:
        reasons: list[str] = []
        for given, wanted in tests.pairs:
            if not program.strip():
                reasons.append("no_code")
            elif "timed_out" in reasons:
                reasons.append("timed_out")
            else:
                outcome = await self._sandbox.run(program, stdin=given.encode(), limits=self._limits)
                wrong = "" if _lines(outcome.stdout.decode(errors="replace")) == _lines(wanted) else "wrong"
                reasons.append(_reason(outcome) or wrong)
        return reasons

    async def _by_statements(self, program: str, tests: Statements) -> list[str]:
        if not program.strip():
            return ["no_code"] * len(tests.statements)
        password = secrets.token_hex(16)
        outcome = await self._sandbox.run(
            Path(harness.__file__).read_text(encoding="utf-8"),
            stdin=json.dumps({"password": password, "tests": tests.statements}).encode(),
            limits=self._limits,
            files={harness.SOLUTION: joined(program, tests).encode(errors="replace")},
        )
        before, found, verdicts = outcome.stdout.partition(password.encode())
        if not found or before or not outcome.fine:
            return [_reason(outcome) or "crashed"] * len(tests.statements)
        kinds = {"": "", "AssertionError": "wrong", "MemoryError": "out_of_memory"}
        return [kinds.get(verdict, "crashed") for verdict in json.loads(verdicts)]


def code_limits(config: RolloutConfig) -> Limits:
    """The limits the knobs set."""
    return Limits(
        wall=config.code_wall_seconds,
        cpu=config.code_cpu_seconds,
        memory=config.code_memory_mib * MIB,
        processes=config.code_processes,
        file=config.code_scratch_mib * MIB,
        scratch=config.code_scratch_mib * MIB,
        output=config.code_output_kib << 10,
    )


def program_of(reply: str) -> str:
    """The last fenced block of Python, or of any or no language; without a fence, the whole reply.

    >>> program_of("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```python\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = [(language.lower(), body) for language, body in _FENCE.findall(reply)]
    python = [body for language, body in blocks if language in _PYTHON]
    if python or blocks:
        return python[-1] if python else blocks[-1][1]
    opened = reply.rfind("```")  # a fence that was cut off before it closed
    return reply if opened < 0 else reply[opened:].partition("\n")[2]


def joined(program: str, tests: Statements) -> str:
    """The program below what stands above it: as its continuation, unless it defines what is asked for itself."""
    if not tests.before:
        return program
    return tests.before + ("\n\n" if defines(program, tests.entry_point) else "") + program


def defines(program: str, name: str) -> bool:
    """Whether a program has a function or class of this name at its outermost level."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        node.name == name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def tests_of(prompt: Prompt) -> Tests:
    """The prompt's tests; BadLabel when there are none that can be read."""
    label = prompt.label
    if label is None or not label.strip():
        if all(name in prompt.metadata for name in _HUMAN_EVAL):
            return _human_eval(prompt.metadata)
        raise BadLabel("it has neither a label (--label-key) nor test and entry_point in its metadata")
    try:
        given = json.loads(label)
    except ValueError:
        return _statements([label])
    if not isinstance(given, dict):
        raise BadLabel(f"its label is a JSON {type(given).__name__}, not an object such as {{'tests': [...]}}")
    return _of_object(given)


def _of_object(given: Mapping[str, Any]) -> Tests:
    if all(name in given for name in _HUMAN_EVAL):
        return _human_eval(given)
    if "inputs" in given and "outputs" in given:
        return _pairs(given["inputs"], given["outputs"])
    tests = given.get("tests")
    if isinstance(tests, str):
        return _statements([tests])
    if not isinstance(tests, list) or not tests:
        raise BadLabel("its label has no tests, nor inputs and outputs, nor test and entry_point")
    if all(isinstance(test, str) for test in tests):
        return _statements(tests)
    try:
        ends = [(test["input"], test["output"]) if isinstance(test, dict) else tuple(test) for test in tests]
        inputs, outputs = zip(*ends, strict=True)
    except (KeyError, TypeError, ValueError) as error:
        raise BadLabel("a test is neither a statement nor a pair of input and output") from error
    return _pairs(inputs, outputs)


def _human_eval(fields: Mapping[str, Any]) -> Statements:
    before, test, name = fields.get("prompt", ""), fields["test"], fields["entry_point"]
    if not all(isinstance(field, str) for field in (before, test, name)) or not name.isidentifier():
        raise BadLabel("prompt, test and entry_point must be text, and entry_point a name")
    return Statements(statements=(f"{test}\n\ncheck({name})\n",), before=before, entry_point=name)


def _statements(tests: Sequence[str]) -> Statements:
    for test in tests:
        try:
            compile(test, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise BadLabel(f"its test is not Python: {error}") from error
    return Statements(statements=tuple(tests))


def _pairs(inputs: Any, outputs: Any) -> Pairs:
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadLabel("its inputs and outputs are not lists of one length")
    if not inputs:
        raise BadLabel("its list of inputs is empty")
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise BadLabel("an input or an output is not text")
    return Pairs(pairs=tuple(zip(inputs, outputs, strict=True)))


def _lines(text: str) -> list[str]:
    """What is compared: lines without white space at their ends, and without empty ones at the end."""
    return [line.strip() for line in text.strip().splitlines()]


def _reason(outcome: Outcome) -> str:
    """Why a run failed, or nothing."""
    if outcome.killed_by is not None:
        return _WHY[outcome.killed_by]
    if outcome.fine:
        return ""
    return "out_of_memory" if b"\nMemoryError" in outcome.stderr[-200:] else "crashed"


def _reward(reasons: Sequence[str]) -> Reward:
    passed = sum(not reason for reason in reasons)
    first = next((reason for reason in reasons if reason), None)
    parts = {"passed": passed / len(reasons), "tests": float(len(reasons))}
    return Reward(value=float(first is None), parts=parts if first is None else parts | {first: 1.0})
