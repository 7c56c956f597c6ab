"""The code reward: right programs earn 1, and wrong, crashing, hanging and cheating ones 0 with the reason."""

import asyncio
import json

import numpy as np
import pytest

from miles.core.errors import DataError, HookError, UsageError
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.config import RolloutConfig
from miles.rollout.reward import code
from miles.rollout.reward.code import CodeReward
from miles.rollout.reward.types import GradingError
from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.build import build_sandbox, sandbox_limits_from_config
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import MIB, SandboxLimits
from miles.rollout.sandbox.run import create_sandbox

# six exercises in HumanEval's shape: prompt, test, entry point, and answers of every sort
EXERCISES = {
    "running_total": (
        'from typing import List\n\ndef running_total(xs: List[int]) -> List[int]:\n    """Sums so far."""\n',
        "def check(candidate):\n    assert candidate([1, 2, 3]) == [1, 3, 6]\n    assert candidate([]) == []\n",
        "    out, s = [], 0\n    for x in xs:\n        s += x\n        out.append(s)\n    return out\n",
        "    return [sum(xs)] * len(xs)\n",
    ),
    "is_anagram": (
        'def is_anagram(a: str, b: str) -> bool:\n    """Are a and b made of the same letters?"""\n',
        "def check(candidate):\n    assert candidate('abc', 'cab')\n    assert not candidate('aab', 'abb')\n",
        "    return sorted(a) == sorted(b)\n",
        "    return set(a) == set(b)\n",
    ),
    "collatz": (
        'def collatz(n: int) -> int:\n    """Steps until n is 1, halving even numbers, 3n + 1 of odd ones."""\n',
        "def check(candidate):\n    assert candidate(1) == 0\n    assert candidate(6) == 8 and candidate(27) == 111\n",
        "    k = 0\n    while n != 1:\n        n = 3 * n + 1 if n % 2 else n // 2\n        k += 1\n    return k\n",
        "    return n.bit_length()\n",
    ),
    "roman": (
        "VALUES = {'I': 1, 'V': 5, 'X': 10, 'L': 50, 'C': 100}\n\n"
        'def roman(text: str) -> int:\n    """The value of a Roman numeral; see VALUES."""\n',
        "def check(candidate):\n    assert candidate('XIV') == 14\n    assert candidate('XC') == 90\n",
        "    v = [VALUES[c] for c in text]\n    return sum(-a if a < b else a for a, b in zip(v, v[1:] + [0]))\n",
        "    return sum(VALUES[c] for c in text)\n",
    ),
    "transpose": (
        'def transpose(rows: list[list[int]]) -> list[list[int]]:\n    """Rows become columns."""\n',
        "def check(candidate):\n    assert candidate([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]]\n",
        "    return [list(column) for column in zip(*rows)]\n",
        "    return [row[::-1] for row in rows]\n",
    ),
    "nth_prime": (
        'def nth_prime(n: int) -> int:\n    """The n-th prime, 2 being the first."""\n',
        "def check(candidate):\n    assert [candidate(n) for n in (1, 2, 10, 100)] == [2, 3, 29, 541]\n",
        "    found, k = [], 2\n    while len(found) < n:\n        if all(k % p for p in found):\n"
        "            found.append(k)\n        k += 1\n    return found[-1]\n",
        "    return 2 * n - 1 if n > 1 else 2\n",
    ),
}
QUICK = SandboxLimits(wall=5.0, cpu=1.0, memory=128 * MIB, output=50_000)
SUM = json.dumps({"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "40 2\n", "output": "42\n"}]})
ADD = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "x = add('a', 'b')\nassert x == 'ab'"]})
RIGHT_SUM = "a, b = map(int, input().split())\nprint(a + b)\n"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    try:
        return CodeReward(QUICK, create_sandbox(unsandboxed=False, concurrency=8))
    except UsageError as error:
        pytest.skip(str(error))


def prompt(label: str | None = None, **metadata: object) -> Prompt:
    return Prompt(id=7, messages=[{"role": "user", "content": "?"}], label=label, metadata=metadata)


def reply(text: str) -> Trajectory:
    span = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    return Trajectory(branches=((span,),), status=Status.COMPLETED, metadata={"text": text})


def graded(reward: CodeReward, asked: Prompt, *texts: str) -> list[Reward]:
    async def all_of_them() -> list[Reward]:
        return list(await asyncio.gather(*(reward(asked, reply(text)) for text in texts)))

    return asyncio.run(all_of_them())


def why(result: Reward) -> set[str]:
    return set(result.parts) - {"passed", "tests"}


@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_is_graded_right(reward, name):
    before, test, right, wrong = EXERCISES[name]
    asked = prompt(prompt=before, test=test, entry_point=name)
    fenced = f"Here it is:\n\n```python\n{before}{right}```\nDone."
    values = graded(
        reward, asked, right, fenced, wrong, "    raise KeyError\n", "    while True: pass\n", "I do not know."
    )
    assert [result.value for result in values] == [1, 1, 0, 0, 0, 0]
    assert [why(result) for result in values] == [
        set(),
        set(),
        {"wrong"},
        {"crashed"},
        {"timed_out"},
        {"crashed"},
    ]


def test_the_fields_of_an_exercise_may_be_the_label(reward):
    before, test, right, wrong = EXERCISES["is_anagram"]
    asked = prompt(json.dumps({"prompt": before, "test": test, "entry_point": "is_anagram", "task_id": "T/1"}))
    assert [result.value for result in graded(reward, asked, right, wrong)] == [1, 0]


def test_programs_are_tried_on_examples(reward):
    half = "a, b = map(int, input().split())\nprint(3)\n"
    results = graded(reward, prompt(SUM), RIGHT_SUM, half, "print(1 / 0)", "```python\n```", "while True: pass")
    assert [result.value for result in results] == [1, 0, 0, 0, 0]
    assert [result.parts["passed"] for result in results] == [1, 0.5, 0, 0, 0]
    assert [why(result) for result in results] == [set(), {"wrong"}, {"crashed"}, {"no_code"}, {"timed_out"}]
    assert all(result.parts["tests"] == 2 for result in results)


@pytest.mark.parametrize(
    "label",
    [
        json.dumps({"inputs": ["1 2", "40 2"], "outputs": ["3", "42"]}),
        json.dumps({"tests": [["1 2\n", "3"], ["40 2\n", "42   \n\n"]]}),
    ],
)
def test_examples_are_written_in_other_ways_too(reward, label):
    assert [result.value for result in graded(reward, prompt(label), RIGHT_SUM, "print(3)")] == [1, 0]


def test_statements_are_counted_one_by_one(reward):
    right, numbers = "def add(a, b): return a + b", "def add(a, b): return int(a) + int(b)"
    results = graded(reward, prompt(ADD), right, numbers, "def add(a, b): return 3", "def sub(a, b): return a - b")
    assert [result.value for result in results] == [1, 0, 0, 0]
    assert [round(result.parts["passed"] * 3) for result in results] == [3, 2, 1, 0]
    assert [why(result) for result in results] == [set(), {"crashed"}, {"wrong"}, {"crashed"}]


def test_a_label_that_is_code_is_one_test(reward):
    asked = prompt("assert add(1, 2) == 3\nassert add(0, 0) == 0\n")
    results = graded(reward, asked, "def add(a, b): return a + b", "def add(a, b): return 3")
    assert [(result.value, result.parts["tests"]) for result in results] == [(1, 1), (0, 1)]


@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        'print(\'["", "", ""]\'); import os; os._exit(0)',
        'import os\nfor n in range(1, 9):\n  try: os.write(n, b\'["","",""]\')\n  except OSError: pass\nos._exit(0)',
        "import atexit, os; atexit.register(os._exit, 0)",
        "import sys; sys.excepthook = lambda *_: None\nadd = None",
        "import builtins; builtins.exec = lambda *_: None; builtins.compile = lambda *_: None\ndef add(a, b): return 0",
        "import json; json.loads = lambda _: {'tests': [], 'password': ''}\ndef add(a, b): return 0",
    ],
)
def test_ending_early_or_talking_earns_nothing(reward, cheat):
    (result,) = graded(reward, prompt(ADD), cheat)
    assert result.value == 0 and len(why(result)) == 1


def test_limits_are_reasons(reward):
    memory = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    results = graded(reward, prompt(SUM), "while True: print('x' * 99)", memory, "x = bytearray(1 << 40)")
    assert [why(result) for result in results] == [{"too_much_output"}, {"out_of_memory"}, {"out_of_memory"}]
    forks = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert why(graded(reward, prompt(SUM), forks)[0]) <= {"too_many_processes", "timed_out"}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1\n", "x = 1\n"),
        ("Say:\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```py\na\n```\nor\n```\nb\n```", "b\n"),
        ("```python\na\n```\noutput:\n```text\n42\n```", "a\n"),
        ("```javascript\na\n```", "a\n"),
        ("```python\ncut off", "cut off"),
        ("  ```python\n  x\n  ```", "  x\n"),
        ("```python title=a.py\nx\n```", "x\n"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_python(text, program):
    assert code.extract_program(text) == program


@pytest.mark.parametrize(
    "asked",
    [
        prompt(),
        prompt(""),
        prompt("[1, 2]"),
        prompt("{}"),
        prompt('{"tests": []}'),
        prompt('{"tests": [1]}'),
        prompt('{"tests": [{"input": "1"}]}'),
        prompt('{"tests": [["1", "2", "3"]]}'),
        prompt('{"tests": [["1", 2]]}'),
        prompt('{"inputs": ["1"], "outputs": []}'),
        prompt('{"inputs": [], "outputs": []}'),
        prompt("assert (", **{}),
        prompt(test="def check(f): pass", entry_point="not a name"),
        prompt(test=1, entry_point="f"),
    ],
)
def test_tests_that_cannot_be_read_are_the_datas_fault(reward, asked):
    with pytest.raises(DataError, match="Prompt 7"):
        asyncio.run(reward(asked, reply("x")))


def test_a_reply_without_text_is_the_hooks_fault(reward):
    with pytest.raises(HookError, match="text"):
        asyncio.run(reward(prompt(SUM), Trajectory(branches=(), status=Status.COMPLETED)))


def test_a_sandbox_that_fails_leaves_the_trajectory_unscored(reward, monkeypatch):
    async def broken(*_: object, **__: object) -> None:
        raise SandboxError("The sandbox could not run it.")

    monkeypatch.setattr(reward._sandbox, "run", broken)
    with pytest.raises(GradingError, match="could not run"):
        asyncio.run(reward(prompt(SUM), reply("x")))


def test_a_machine_without_walls_is_refused_when_the_reward_is_made(monkeypatch):
    none = isolation.IsolationProbe(landlock=0, seccomp="prctl: no", user="no", root="no", apart="no")
    monkeypatch.setattr(isolation, "probe_isolation", lambda: none)
    with pytest.raises(UsageError, match="--allow-unsandboxed-code"):
        build_sandbox(RolloutConfig())
    build_sandbox(RolloutConfig(allow_unsandboxed_code=True))


def test_knobs_set_the_limits():
    limits = sandbox_limits_from_config(RolloutConfig(code_memory_mib=100, code_output_kib=3, code_wall_seconds=2.5))
    assert (limits.memory, limits.output, limits.wall) == (100 * MIB, 3072, 2.5)
    assert sandbox_limits_from_config(RolloutConfig()) == SandboxLimits()
