"""Programs that try to pass hidden tests without solving the task, and honest ones that the checks must not harm."""

import asyncio
import json

import pytest
from tests.rollout.reward.test_code import QUICK, prompt, reply

from miles.core.errors import UsageError
from miles.core.types import Reward
from miles.rollout.reward import code
from miles.rollout.reward.code import CodeReward
from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.protocol import IsolationPlan, SandboxResult
from miles.rollout.sandbox.run import Sandbox, create_sandbox

LIMITS = QUICK._replace(wall=120.0, cpu=5.0)
EXPECTED = 7919  # what the hidden tests want, and no program below contains
HIDDEN = json.dumps({"tests": [f"assert f(1000) == {EXPECTED}", f"assert abs(f(1000) - {EXPECTED}) < 1e-6"]})
FORGE = '["", ""]'

FORGERIES = {
    "exits with success": "import os; os._exit(0)",
    "exits in the call": "def f(n):\n    import os\n    os._exit(0)",
    "raises SystemExit": "def f(n): raise SystemExit(0)",
    "exits at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef f(n): raise SystemExit",
    "ends loops of the test": "def f(n): raise StopIteration",
    "writes verdicts to every descriptor": f"""
import os
for fd in range(64):
    try: os.write(fd, b'{FORGE}\\n')
    except OSError: pass
os._exit(0)
""",
    "answers before it is asked": """
import json, os
names = json.dumps({"names": {"f": {"value": {"ref": 0}}}})
results = [json.dumps({"result": value}) for value in (True, {"builtin": "object"}, {"ref": 1}, 1, [], {}, None)]
for fd in range(3, 64):
    for line in (names, *results):
        try: os.write(fd, line.encode() + b"\\n")
        except OSError: pass
""",
    "reads the tests from every descriptor": """
import os, re, select
found = ""
for fd in range(64):
    try:
        if select.select([fd], [], [], 0)[0]:
            os.set_blocking(fd, False)
            found += os.read(fd, 1 << 20).decode(errors="replace")
    except (OSError, ValueError): pass
wanted = [int(n) for n in re.findall(r"== (\\d+)", found)] or [0]
def f(n): return wanted[0]
""",
    "patches Python": """
import builtins, json, sys, os, operator
builtins.exec = builtins.compile = builtins.eval = lambda *_, **__: None
builtins.AssertionError = type("AssertionError", (Exception,), {})
builtins.isinstance = lambda *_: True
json.loads = json.dumps = lambda *_: "[]"
sys.exit = os._exit = lambda *_: None
operator.eq = lambda *_: True
def f(n): return 0
""",
    "turns off assertions": "import sys\nsys.flags = None\n__debug__x = False\ndef f(n): return 0",
    "shadows what the test uses": "def f(n): return 0\ndef abs(x): return 0\nint = float = AssertionError = abs",
    "is equal to everything": """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
    def __hash__(self): return 0
    def __bool__(self): return True
def f(n): return Always()
""",
    "is a number equal to everything": """
class Always(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    __hash__ = int.__hash__
def f(n): return Always(0)
""",
    "is a class under the function's name": """
class f:
    def __init__(self, n): pass
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    __hash__ = None
""",
    "returns what equals anything": "from unittest.mock import ANY\ndef f(n): return ANY",
    "claims to be the library's": "from unittest.mock import MagicMock\nf = MagicMock(return_value=0)",
    "lies about its names": """
import __main__
__main__.ProgramPeer._describe = lambda self, value: {"library": ["unittest.mock", "ANY"]}
def f(n): return 0
""",
    "returns the test's own functions": """
import __main__
__main__.Peer.encode = lambda self, value: {"own": 0}
def f(n): return 0
""",
    "searches frames and memory for the tests": r"""
import gc, re, sys
def f(n):
    texts, frame = [], sys._getframe()
    while frame is not None:
        texts += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    texts += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (dict, list, tuple, str, bytes))]
    found = re.findall(r"f\(1000\) == (\d+)", " ".join(texts))
    return int(found[0]) if found else 0
""",
    "reads and writes its parent": r"""
import ctypes, os, re
def f(n):
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in {1, 2, 3, os.getppid(), os.getpid() - 1, os.getpid() + 1}:
        for name in ("mem", "maps", "environ", "cmdline", "fd/0", "fd/1", "fd/3", "fd/4"):
            try:
                text = open(f"/proc/{pid}/{name}", "rb").read(1 << 20)
            except OSError:
                continue
            if pid != os.getpid() and (found := re.findall(rb"f\(1000\) == (\d+)", text)):
                return int(found[0])
        libc.ptrace(16, pid, 0, 0)
    return 0
""",
    "kills the process that checks": """
import os, signal
def f(n):
    for pid in (os.getppid(), os.getpid() - 1, os.getpid() + 1, -1):
        try: os.kill(pid, signal.SIGTERM)
        except OSError: pass
    return 0
""",
    "plants modules for the test to import": f"""
for name in ("math", "json", "re", "random", "builtins", "sitecustomize", "tests", "operator"):
    open(name + ".py", "w").write("import os\\nos.write(1, b'{FORGE}')\\nos._exit(0)")
def f(n): return 0
""",
    "replaces its own source": "open('solution.py', 'w').write('def f(n): return 0')\ndef f(n): return 0",
    "writes forever": "def f(n):\n    import os\n    while True: os.write(1, b'x' * 65536)",
    "sends nonsense": """
import os
def f(n):
    for fd in range(3, 64):
        try: os.write(fd, b"[" * 100000 + b"\\n{}\\n[]\\nnull\\n1\\n")
        except OSError: pass
    return 0
""",
    "returns what cannot be sent": "def f(n):\n    x = []\n    x.append(x)\n    return x",
}


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    try:
        return CodeReward(LIMITS, create_sandbox(unsandboxed=False, concurrency=8))
    except UsageError as error:
        pytest.skip(str(error))


def grade(reward: CodeReward, label: str, program: str, **metadata: object) -> Reward:
    return asyncio.run(reward(prompt(label or None, **metadata), reply(f"```python\n{program}\n```")))


@pytest.mark.parametrize("name", FORGERIES)
def test_a_program_passes_no_test_that(reward, name):
    result = grade(reward, HIDDEN, FORGERIES[name])
    assert result.value == 0 and result.parts["passed"] == 0


@pytest.mark.parametrize("name", ["is equal to everything", "searches frames and memory for the tests"])
def test_a_program_passes_no_human_eval_test_that(reward, name):
    check = f"def check(candidate):\n    assert candidate(1000) == {EXPECTED}\n"
    result = grade(reward, "", FORGERIES[name], prompt="def f(n):\n    '''?'''\n", test=check, entry_point="f")
    assert result.value == 0


@pytest.mark.parametrize(
    "stdout",
    [b"", b"{}", b"null", b'[""]', b'["", "", ""]', b"[0, 0]", b"[[], []]", b'["", ""', b"\xff", b"[" * 100_000],
)
def test_a_verdict_of_the_wrong_form_is_a_failure_and_no_error(reward, monkeypatch, stdout):
    async def run(*_: object, **__: object) -> SandboxResult:
        return SandboxResult(exit=0, stdout=stdout)

    monkeypatch.setattr(reward._sandbox, "run", run)
    assert grade(reward, HIDDEN, "def f(n): return 0").parts["crashed"] == 1


HONEST = {
    "calls functions it is given": (
        "def f(g, xs): return [g(x) for x in xs]",
        ["assert f(lambda x: x + 1, [1, 2]) == [2, 3]", "k = 3\nassert f(lambda x: x * k, range(3)) == [0, 3, 6]"],
    ),
    "changes what it is given": (
        "def f(xs, d):\n    xs.sort()\n    xs[0].append(1)\n    d['k'] = len(xs)",
        ["a, b, d = [[2], [1]], [3], {}\ninner = a[1]\nf(a, d)\nassert a == [[1, 1], [2]] and d == {'k': 2}"],
    ),
    "defines classes": (
        "class Stack:\n    size = 0\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __add__(self, other):\n        s = Stack(); s.items = self.items + other.items; return s\n"
        "    def __eq__(self, other): return self.items == other.items\n"
        "    @staticmethod\n    def make(): return Stack()\n",
        [
            "s = Stack()\nassert s.push(1) is s and s.push((2, 3)).pop() == (2, 3)",
            "assert len(s) == 1 and s[0] == 1 and list(s) == [1] and 1 in s and isinstance(s, Stack)",
            "assert s + Stack().push(2) == Stack().push(1).push(2) and s.items == [1]",
            "s.name = 'x'\nassert s.name == 'x' and Stack.size == 0 and not isinstance(3, Stack) and not Stack.make()",
        ],
    ),
    "raises": (
        "class Odd(ValueError): pass\ndef f(n):\n    if n % 2: raise Odd(n, 'odd')\n    return [][n]",
        [
            "try:\n    f(3)\n    assert False\nexcept Odd as error:\n    assert error.args == (3, 'odd')",
            "try:\n    f(3)\n    assert False\nexcept ValueError:\n    pass",
            "try:\n    f(2)\n    assert False\nexcept IndexError:\n    pass",
        ],
    ),
    "yields and awaits": (
        "import asyncio\ndef f(n):\n    for i in range(n): yield i\n"
        "async def g(n):\n    await asyncio.sleep(0)\n    return n\n"
        "def adder(n): return lambda x: x + n",
        [
            "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and sum(f(4)) == 6",
            "import asyncio\nassert asyncio.run(g(5)) == 5",
            "assert adder(3)(4) == 7",
        ],
    ),
    "returns data of many types": (
        "from collections import Counter, defaultdict, deque, namedtuple\nfrom decimal import Decimal\n"
        "from fractions import Fraction\nimport datetime, math, enum\nP = namedtuple('P', 'x y')\n"
        "class Color(enum.IntEnum):\n    RED = 2\n"
        "def f(k):\n    d = defaultdict(list); d[1].append(2)\n"
        "    return {'n': None, 'big': 10**5000, 'f': 0.1, 'nan': math.nan, 'c': 1j, 's': '\\ud800\\u20ac',"
        " 'b': b'\\xff', 't': (1, [2]), 'set': {1},"
        " 'p': P(1, 2), 'd': d, 'q': deque([1]), 'count': Counter('aab'), 'e': Color.RED,"
        " 'dec': Decimal('1.10'), 'fr': Fraction(1, 3), 'day': datetime.date(2020, 2, 29), 'keys': {'a': 1}.keys(),"
        " 'r': range(3), 'i': int, 'ba': bytearray(b'x'), 'td': datetime.timedelta(1)}[k]",
        [
            "assert f('n') is None and f('big') == 10**5000 and f('f') == 0.1 and f('nan') != 1 and f('c') == 1j",
            "assert f('s') == '\\ud800\\u20ac' and f('b') == b'\\xff' and f('t') == (1, [2]) and f('set') == {1}",
            "assert f('p') == (1, 2) and f('d') == {1: [2]} and list(f('q')) == [1] and f('count') == {'a': 2, 'b': 1}",
            "assert f('e') == 2 and f('i') is int and f('ba') == bytearray(b'x') and f('r') == range(3)",
            "assert f('dec') == Decimal('1.1') and f('fr') == Fraction(1, 3) and f('keys') == {'a'}",
            "assert str(f('day')) == '2020-02-29' and f('td').days == 1 and math.isnan(f('nan'))",
            "assert Counter([1]) == {1: 1}",
        ],
    ),
    "has a name of Python's": ("def sum(a, b): return a + b", ["assert sum(10, 15) == 25"]),
    "takes types": (
        "def f(xs, kind): return [x for x in xs if isinstance(x, kind)]",
        ["assert f([1, 'a'], int) == [1]"],
    ),
    "prints and reads nothing": (
        "import sys\nprint('hello'); print(sys.stdin.read())\ndef f(n): print(n); return n",
        ["assert f(2) == 2", "from solution import f as g\nprint('test')\nassert g(3) == 3"],
    ),
    "has constants and helpers": (
        "LIMIT = [3]\nimport functools\n@functools.lru_cache\ndef f(n): return 1 if n < 2 else f(n - 1) + f(n - 2)",
        ["assert LIMIT == [3] and f(30) == 1346269 and callable(f) and f.__name__ == 'f'"],
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes_that(reward, name):
    program, tests = HONEST[name]
    result = grade(reward, json.dumps({"tests": tests}), program)
    assert result.parts == {"passed": 1.0, "tests": len(tests)}


def test_one_process_each_is_enough(reward, monkeypatch):
    """Root without namespaces may not fork, and is still graded in two processes."""
    abi = isolation.probe_isolation().landlock
    if not abi:
        pytest.skip("no Landlock here")
    monkeypatch.setattr(reward, "_sandbox", Sandbox(IsolationPlan(landlock=abi, seccomp=True)))
    label = json.dumps({"tests": ["assert f(1) == 2"]})
    programs = ("def f(n): return n + 1", FORGERIES["is equal to everything"])
    assert [grade(reward, label, program).value for program in programs] == [1, 0]


def test_objects_of_classes_before_the_program_are_compared_by_the_tests(reward):
    before = (
        "class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n\n"
        "def build(xs):\n    node = None\n    for x in reversed(xs): node = Node(x, node)\n    return node\n\n"
        "def values(node):\n    found = []\n    while node: found.append(node.val); node = node.next\n"
        "    return found\n\n"
        "def flip(head):\n    '''Reverse a list.'''\n"
    )
    check = "def check(candidate):\n    assert values(candidate(build([1, 2, 3]))) == [3, 2, 1]\n"
    fields = {"prompt": before, "test": check, "entry_point": "flip"}
    right = "    last = None\n    while head:\n        head.next, last, head = last, head, head.next\n    return last\n"
    cheat = "    return head\n\ndef values(node): return [3, 2, 1]\n"
    graded = [asyncio.run(reward(prompt(None, **fields), reply(text))).value for text in (right, cheat)]
    assert graded == [1, 0]


def test_the_checking_process_alone_is_started_with_the_tests(reward, monkeypatch):
    seen = {}
    real = reward._sandbox.run

    async def run(program, **more):
        seen.update(more, program=program)
        return await real(program, **more)

    monkeypatch.setattr(reward._sandbox, "run", run)
    assert grade(reward, HIDDEN, "def f(n): return 7919").value == 1
    given = [*seen["companion"], *(body.decode() for body in seen["files"].values())]
    assert "assert f(" not in "".join(given) and code.harness.SOLUTION in seen["files"]
