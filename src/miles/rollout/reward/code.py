"""Code reward: runs the program in a response against the prompt's tests, in the sandbox.

Where the tests come from, and their formats::

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.types import BadLabel, GradingError, get_response_text
from miles.rollout.sandbox import harness
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import SandboxLimits, SandboxResult
from miles.rollout.sandbox.run import CodeSandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "py", "python3")
_HUMAN_EVAL = ("test", "entry_point")
_REASONS = {  # exceeded limit -> the reward part it is counted under
    "wall": "timed_out",
    "cpu": "timed_out",
    "memory": "out_of_memory",
    "output": "too_much_output",
    "processes": "too_many_processes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IOTests:
    """Tests as pairs of standard input and expected standard output."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTests:
    """Tests as Python statements that must not raise. ``before`` precedes the program; a response that does not define
    ``entry_point`` continues it."""

    statements: tuple[str, ...]
    before: str = ""
    entry_point: str = ""


Tests = IOTests | AssertTests


class CodeReward:
    """1 when all tests pass, else 0 (see core.protocols.RewardFn).

    ``parts``: ``passed``, the fraction of tests that did; ``tests``, their number; and when not all passed, why the
    first failure happened, as one more part with the value 1: ``no_code``, ``wrong``, ``crashed``, ``timed_out``,
    ``out_of_memory``, ``too_much_output`` or ``too_many_processes``. A program that ran out of time once is
    not run again, and its other tests count as failed.
    """

    def __init__(self, limits: SandboxLimits, sandbox: CodeSandbox) -> None:
        self._limits = limits
        self._sandbox = sandbox

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = get_response_text("code", trajectory)
        try:
            tests = parse_tests(prompt)
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by code: {error}.") from error
        program = extract_program(reply)
        try:
            if isinstance(tests, IOTests):
                reasons = await self._run_io_tests(program, tests)
            else:
                reasons = await self._run_assert_tests(program, tests)
        except SandboxError as error:
            raise GradingError(str(error)) from error
        return _to_reward(reasons)

    async def _run_io_tests(self, program: str, tests: IOTests) -> list[str]:
        reasons: list[str] = []
        for inputs_text, expected_output in tests.pairs:
            if not program.strip():
                reasons.append("no_code")
            elif "timed_out" in reasons:
                reasons.append("timed_out")
            else:
                outcome = await self._sandbox.run(program, stdin=inputs_text.encode(), limits=self._limits)
                wrong = (
                    ""
                    if _comparable_lines(outcome.stdout.decode(errors="replace")) == _comparable_lines(expected_output)
                    else "wrong"
                )
                reasons.append(_failure_reason(outcome) or wrong)
        return reasons

    async def _run_assert_tests(self, program: str, tests: AssertTests) -> list[str]:
        if not program.strip():
            return ["no_code"] * len(tests.statements)
        request = {"tests": tests.statements, "before": tests.before, "entry_point": tests.entry_point}
        outcome = await self._sandbox.run(
            _harness_command(self._sandbox.python, "check"),
            stdin=json.dumps(request).encode(),
            limits=self._limits,
            files={harness.SOLUTION: assemble_program(program, tests).encode(errors="replace")},
            companion=_harness_command(self._sandbox.python, "serve"),
        )
        verdicts = _parse_verdicts(outcome, len(tests.statements))
        if verdicts is None:
            return [_failure_reason(outcome) or "crashed"] * len(tests.statements)
        kinds = {"": "", "AssertionError": "wrong", "MemoryError": "out_of_memory"}
        return [kinds.get(verdict, "crashed") for verdict in verdicts]


def extract_program(reply: str) -> str:
    """The last fenced block of Python, or of any or no language; without a fence, the whole response.

    >>> extract_program("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```python\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    blocks = [(language.lower(), body) for language, body in _FENCE.findall(reply)]
    python = [body for language, body in blocks if language in _PYTHON]
    if python or blocks:
        return python[-1] if python else blocks[-1][1]
    opened = reply.rfind("```")  # a fence that was cut off before it closed
    return reply if opened < 0 else reply[opened:].partition("\n")[2]


def assemble_program(program: str, tests: AssertTests) -> str:
    """Prepend ``before`` to the program: as its continuation, unless it defines ``entry_point`` itself."""
    if not tests.before:
        return program
    return tests.before + ("\n\n" if defines_name(program, tests.entry_point) else "") + program


def defines_name(program: str, name: str) -> bool:
    """Whether a program defines this function or class at module level."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        node.name == name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def parse_tests(prompt: Prompt) -> Tests:
    """Parse the prompt's tests; BadLabel when there are none."""
    label = prompt.label
    if label is None or not label.strip():
        if all(name in prompt.metadata for name in _HUMAN_EVAL):
            return _parse_human_eval(prompt.metadata)
        raise BadLabel("it has neither a label (--label-key) nor test and entry_point in its metadata")
    try:
        parsed = json.loads(label)
    except ValueError:
        return _parse_statements([label])
    if not isinstance(parsed, dict):
        raise BadLabel(f"its label is a JSON {type(parsed).__name__}, not an object such as {{'tests': [...]}}")
    return _parse_tests_object(parsed)


def _parse_tests_object(parsed: Mapping[str, Any]) -> Tests:
    if all(name in parsed for name in _HUMAN_EVAL):
        return _parse_human_eval(parsed)
    if "inputs" in parsed and "outputs" in parsed:
        return _parse_pairs(parsed["inputs"], parsed["outputs"])
    tests = parsed.get("tests")
    if isinstance(tests, str):
        return _parse_statements([tests])
    if not isinstance(tests, list) or not tests:
        raise BadLabel("its label has no tests, nor inputs and outputs, nor test and entry_point")
    if all(isinstance(test, str) for test in tests):
        return _parse_statements(tests)
    try:
        pairs = [(test["input"], test["output"]) if isinstance(test, dict) else tuple(test) for test in tests]
        inputs, outputs = zip(*pairs, strict=True)
    except (KeyError, TypeError, ValueError) as error:
        raise BadLabel("a test is neither a statement nor a pair of input and output") from error
    return _parse_pairs(inputs, outputs)


def _parse_human_eval(fields: Mapping[str, Any]) -> AssertTests:
    before = fields.get("prompt", "")
    test = fields["test"]
    name = fields["entry_point"]
    if not all(isinstance(field, str) for field in (before, test, name)) or not name.isidentifier():
        raise BadLabel("prompt, test and entry_point must be text, and entry_point a name")
    return AssertTests(statements=(f"{test}\n\ncheck({name})\n",), before=before, entry_point=name)


def _parse_statements(tests: Sequence[str]) -> AssertTests:
    for test in tests:
        try:
            compile(test, "test", "exec")
        except (SyntaxError, ValueError) as error:
            raise BadLabel(f"its test is not Python: {error}") from error
    return AssertTests(statements=tuple(tests))


def _parse_pairs(inputs: Any, outputs: Any) -> IOTests:
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise BadLabel("its inputs and outputs are not lists of one length")
    if not inputs:
        raise BadLabel("its list of inputs is empty")
    if not all(isinstance(text, str) for text in (*inputs, *outputs)):
        raise BadLabel("an input or an output is not text")
    return IOTests(pairs=tuple(zip(inputs, outputs, strict=True)))


def _harness_command(python: str, role: str) -> tuple[str, ...]:
    """The command of one of the harness's processes. The checking one imports nothing from the scratch folder (-P),
    where the program may write."""
    source = Path(harness.__file__).read_text(encoding="utf-8")
    flags = ("-P",) if role == "check" else ()
    return (python, *flags, "-s", "-S", "-B", "-c", source, role)


def _parse_verdicts(outcome: SandboxResult, count: int) -> list[str] | None:
    """The verdicts of the checking process; None where it did not end by itself with one for each test."""
    if not outcome.is_success or outcome.killed_by is not None:
        return None
    try:
        verdicts = json.loads(outcome.stdout)
    except (ValueError, RecursionError):
        return None
    if not isinstance(verdicts, list) or len(verdicts) != count:
        return None
    return verdicts if all(isinstance(verdict, str) for verdict in verdicts) else None


def _comparable_lines(text: str) -> list[str]:
    """Lines to compare: without surrounding white space, and without trailing empty lines."""
    return [line.strip() for line in text.strip().splitlines()]


def _failure_reason(outcome: SandboxResult) -> str:
    """The reason a run failed, or an empty string."""
    if outcome.killed_by is not None:
        return _REASONS[outcome.killed_by]
    if outcome.is_success:
        return ""
    return "out_of_memory" if b"\nMemoryError" in outcome.stderr[-200:] else "crashed"


def _to_reward(reasons: Sequence[str]) -> Reward:
    passed = sum(not reason for reason in reasons)
    first = next((reason for reason in reasons if reason), None)
    parts = {"passed": passed / len(reasons), "tests": float(len(reasons))}
    return Reward(value=float(first is None), parts=parts if first is None else parts | {first: 1.0})
