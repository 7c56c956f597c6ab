"""Test harness inside the sandbox: one process runs the tests and calls the program, in another process, over a pipe.

Its source is the command of both processes (``check`` and ``serve``); this package never imports it to run it::

    check:  tests on stdin, verdicts on stdout  --call by name, arguments as data-->  serve:  loads the program
                                                <--result or exception, as data----

The program's process never holds a test, an expected value or the pipe of the verdicts, so there is nothing to find,
patch or forge: all it can do is to return values. They arrive as plain data of built-in types. An object of a class of
the program's own arrives as a reference: its methods are called over the pipe, but it is never equal to, less than or
a container of a value of the test. Functions of a test are passed as references too, and can only be called.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Mapping

TYPE_CHECKING = False  # typing is slow to import, and this starts anew for every program
if TYPE_CHECKING:
    from typing import Any

SOLUTION = "solution.py"
ANSWERS, CALLS = 3, 4  # the checking process's ends of the pipes: from the program, and to it

_MAX_DEPTH = 10_000
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert")
_CONVERSIONS = {"str": str, "repr": repr, "bool": bool, "int": int, "float": float, "complex": complex, "len": len}
_ROUTINES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_ITERATORS = ("builtins", "itertools")

# Values of the standard library that are passed by value: their module, and the arguments that rebuild them.
_MADE: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "tuple": ("builtins", lambda value: (list(tuple.__iter__(value)),)),
    "set": ("builtins", lambda value: (list(value),)),
    "frozenset": ("builtins", lambda value: (list(value),)),
    "complex": ("builtins", lambda value: (value.real, value.imag)),
    "range": ("builtins", lambda value: (value.start, value.stop, value.step)),
    "Decimal": ("decimal", lambda value: (str(value),)),
    "Fraction": ("fractions", lambda value: (value.numerator, value.denominator)),
    "date": ("datetime", lambda value: (value.year, value.month, value.day)),
    "time": ("datetime", lambda value: (value.hour, value.minute, value.second, value.microsecond)),
    "datetime": ("datetime", lambda value: (*value.timetuple()[:6], value.microsecond)),
    "timedelta": ("datetime", lambda value: (value.days, value.seconds, value.microseconds)),
    "deque": ("collections", lambda value: (list(value), value.maxlen)),
    "Counter": ("collections", lambda value: (dict(value),)),
    "OrderedDict": ("collections", lambda value: (list(value.items()),)),
}
# Modules whose names a test may use without importing them where the program did.
_LIBRARY = frozenset(
    """abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math
    operator random re statistics string typing""".split()  # noqa: SIM905 (a list would fill twenty lines)
)


class ProgramError(Exception):
    """The program's process ended, or sent what is no message."""


class Peer:
    """One end of the pipe: requests and replies as lines of JSON, values as data or references.

    While it waits for a reply it answers requests, so that calls may nest. ``shared`` are classes that both sides
    have: their objects are passed by value.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._buffer = bytearray()
        self._exported: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._remote: dict[int, Remote] = {}
        self.shared: dict[str, type] = {}

    def request(self, op: str, target: Any, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> Any:
        """Have the other side do something with an object of its own, and return the result."""
        raise NotImplementedError

    def run(self, op: str, args: list[Any]) -> dict[str, Any]:
        """Do what the other side requests; returns the reply."""
        raise NotImplementedError

    # -- messages ---------------------------------------------------------------------------

    def ask(self, op: str, *args: Any) -> dict[str, Any]:
        """Send a request and return the reply."""
        self._send({"op": op, "args": [self.encode(arg) for arg in args]})
        while True:
            message = self.receive()
            if message is None:
                raise ProgramError("the program's process ended")
            if "op" not in message:
                return message
            self.answer(message)

    def answer(self, message: Mapping[str, Any]) -> None:
        """Answer one request."""
        try:
            reply = json.dumps(self.run(message["op"], [self.decode(arg) for arg in message["args"]]))
        except ProgramError:
            raise
        except BaseException as error:  # whatever it is, the asking side has to hear of it
            reply = json.dumps(self._encode_exception(error))
        self._send_line(reply)

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None at the end."""
        while (end := self._buffer.find(b"\n")) < 0:
            chunk = os.read(self._incoming, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProgramError("the program's process sent no message") from error
        if not isinstance(message, dict):
            raise ProgramError("the program's process sent no message")
        return message

    def _send(self, message: Mapping[str, Any]) -> None:
        self._send_line(json.dumps(message))

    def _send_line(self, line: str) -> None:
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._outgoing, rest) :]
        except OSError as error:
            raise ProgramError("the program's process ended") from error

    # -- values -----------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """A value as JSON: plain data by value, anything else as a reference."""
        if value is None or isinstance(value, bool | str | int | float | bytes | bytearray):
            return _encode_scalar(value)
        if isinstance(value, Remote):
            return {"own": get_number(value)}
        if name := _find_made(value):
            return {"make": name, "args": [self.encode(arg) for arg in _MADE[name][1](value)]}
        if isinstance(value, list):
            return {"list": [self.encode(item) for item in list.__iter__(value)]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in dict.items(value)]}
        if type(value) is type({}.keys()):
            return {"keys": [self.encode(key) for key in value]}
        if name := _find_builtin(value):
            return {"builtin": name}
        if type(value) is self.shared.get(type(value).__name__) and hasattr(value, "__dict__"):
            return {"object": type(value).__name__, "state": self.encode(dict(vars(value)))}
        return self.encode_reference(value)

    def encode_reference(self, value: Any) -> dict[str, Any]:
        """Export an object; the same object has the same number."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._exported)
            self._exported[number] = value
        return {"ref": number, "coroutine": isinstance(value, types.CoroutineType)}

    def decode(self, data: Any) -> Any:
        """The value of what ``encode`` made; ProgramError for anything else."""
        try:
            return self._decode(data)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ProgramError(f"the program's process sent no value ({type(error).__name__})") from error

    def _decode(self, data: Any) -> Any:
        if data is None or isinstance(data, bool | str):
            return data
        kind, body = next(iter(data.items()))
        decoders: dict[str, Callable[[], Any]] = {
            "int": lambda: int(body, 16),
            "float": lambda: float.fromhex(body),
            "bytes": lambda: bytes.fromhex(body),
            "bytearray": lambda: bytearray.fromhex(body),
            "list": lambda: [self._decode(item) for item in body],
            "dict": lambda: {self._decode(key): self._decode(item) for key, item in body},
            "keys": lambda: dict.fromkeys(self._decode(key) for key in body).keys(),
            "iterator": lambda: iter([self._decode(item) for item in body]),
            "make": lambda: _make(body, [self._decode(arg) for arg in data["args"]]),
            "builtin": lambda: _get_builtin(body),
            "object": lambda: self._decode_object(body, data["state"]),
            "own": lambda: self._exported[body],
            "ref": lambda: self._decode_reference(int(body), data.get("coroutine") is True),
        }
        return decoders[kind]()

    def _decode_object(self, name: str, state: Any) -> Any:
        made = object.__new__(self.shared[name])
        vars(made).update(self._decode(state))
        return made

    def _decode_reference(self, number: int, is_coroutine: bool) -> Any:
        if number not in self._remote:
            self._remote[number] = Remote(self, number)
        return _await_remote(self, self._remote[number]) if is_coroutine else self._remote[number]

    def _encode_exception(self, error: BaseException) -> dict[str, Any]:
        args = [arg if isinstance(arg, int | float | str | bytes | None) else str(arg) for arg in error.args]
        return {
            "raised": [kind.__name__ for kind in type(error).__mro__],
            "arguments": [self.encode(arg) for arg in args],
        }

    def decode_exception(self, message: Mapping[str, Any], classes: Mapping[str, type[BaseException]]) -> BaseException:
        """The exception of a reply: one of ``classes``, or the nearest built-in one."""
        names, args = message.get("raised"), message.get("arguments")
        if not isinstance(names, list) or not isinstance(args, list):
            return ProgramError("the program's process sent no reply")
        for name in names:
            kind = classes.get(str(name)) or getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                made = kind.__new__(kind)
                made.args = tuple(self.decode(arg) for arg in args)
                return made
        return ProgramError("the program's process raised no exception")


class Remote:
    """A reference to an object or function of the other process."""

    __slots__ = ("__weakref__", "_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.request("call", self, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            raise AttributeError(name)
        return self._peer.request("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, (name, value))

    def __hash__(self) -> int:
        return hash((Remote, self._number))

    def __enter__(self) -> Any:
        return self._peer.request("method", self, ("__enter__",))

    def __exit__(self, *_: object) -> Any:
        return self._peer.request("method", self, ("__exit__", None, None, None))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._peer.request("isinstance", value, (self,)) is True

    def __contains__(self, item: Any) -> bool:
        items: Any = self
        return any(item is found or item == found for found in items)  # the program is not shown what a test looks for


def get_number(remote: Remote) -> int:
    return object.__getattribute__(remote, "_number")


def _add_operation(method: str, op: str) -> None:
    setattr(Remote, f"__{method}__", lambda self, *args: self._peer.request(op, self, args))


def _add_operator(name: str) -> None:
    def apply(self: Any, other: Any) -> Any:
        if not isinstance(other, Remote):
            return NotImplemented  # a value of the test is not shown to the program, nor compared by it
        return self._peer.request("binary", self, (name, other))

    setattr(Remote, f"__{name}__", apply)


for _name in (*_CONVERSIONS, "iter", "next", "getitem", "setitem", "delitem"):
    _add_operation(_name, _name)
for _name in _UNARY:
    setattr(Remote, f"__{_name}__", lambda self, _op=_name: self._peer.request("unary", self, (_op,)))
for _name in (*_BINARY, *_COMPARISONS):
    _add_operator(_name)


async def _await_remote(peer: Peer, remote: Remote) -> Any:
    return peer.request("await", remote)


def _encode_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": format(int.__index__(value), "x")}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}


def _find_made(value: Any) -> str | None:
    """The name in the table of how to make this value again. Subclasses of tuple and set are passed as these."""
    kind = type(value)
    if kind.__name__ in _MADE and kind.__module__ == _MADE[kind.__name__][0]:
        return kind.__name__
    return next((base.__name__ for base in (tuple, set, frozenset) if isinstance(value, base)), None)


def _make(name: str, args: list[Any]) -> Any:
    return getattr(importlib.import_module(_MADE[name][0]), name)(*args)


def _find_builtin(value: Any) -> str | None:
    name = getattr(value, "__name__", None) if isinstance(value, type | types.BuiltinFunctionType) else None
    return name if isinstance(name, str) and getattr(builtins, name, None) is value else None


def _get_builtin(name: str) -> Any:
    found = getattr(builtins, name)
    if not isinstance(found, type) and name in ("exec", "eval", "compile", "open", "input", "__import__"):
        raise ValueError(name)
    return found


def _merge(before: Any, after: Any) -> Any:
    """Change what a test passed as the program changed its copy; returns what is now in its place."""
    if type(before) is not type(after):
        return after
    if isinstance(before, list):
        merged = [_merge(old, new) for old, new in zip(before, after, strict=False)]
        before[:] = merged + after[len(merged) :]
    elif isinstance(before, dict):
        merged_items = {key: _merge(before[key], item) if key in before else item for key, item in after.items()}
        before.clear()
        before.update(merged_items)
    elif isinstance(before, set):
        before.intersection_update(after)
        before.update(after)
    elif isinstance(before, bytearray):
        before[:] = after
    elif type(before).__name__ == "deque":
        before.clear()
        before.extend(after)
    elif not isinstance(before, Remote) and hasattr(before, "__dict__") and not isinstance(before, _ROUTINES):
        _merge(vars(before), vars(after))
    else:
        return after
    return before


# -- the program's process ------------------------------------------------------------------


class ProgramPeer(Peer):
    """The program's end: answers the requests of the checking process."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__(incoming, outgoing)
        self._namespace: dict[str, Any] = {"__name__": "solution", "__file__": SOLUTION}

    def request(self, op: str, target: Any, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> Any:
        """Call a function of the test, the only thing a program can do with what it was passed."""
        if op != "call":
            raise TypeError("an object of the test can only be called")
        reply = self.ask("callback", target, list(args), dict(named or {}))
        if "result" not in reply:
            raise self.decode_exception(reply, {})
        return self.decode(reply["result"])

    def run(self, op: str, args: list[Any]) -> dict[str, Any]:
        if op == "load":
            return self._load(*args)
        if op == "call":
            function, positional, named = args
            value = function(*positional, **named)
            return {"result": self.encode(value), "changed": self.encode([positional, named])}
        return {"result": self.encode(_OPERATIONS[op](*args))}

    def _load(self, shared: list[str]) -> dict[str, Any]:
        """Run the program; the reply lists its names."""
        with open(SOLUTION, encoding="utf-8") as file:
            source = file.read()
        module = types.ModuleType("solution")
        vars(module).update(self._namespace)
        self._namespace = vars(module)
        sys.modules["solution"] = module
        exec(compile(source, SOLUTION, "exec"), self._namespace)
        own = {name: value for name, value in self._namespace.items() if not name.startswith("__")}
        self.shared = {name: own[name] for name in shared if isinstance(own.get(name), type)}
        return {"names": {name: self._describe(value) for name, value in own.items()}}

    def _describe(self, value: Any) -> dict[str, Any]:
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == "solution":
            return {"exception": [kind.__name__ for kind in value.__mro__]}
        module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if module in _LIBRARY and isinstance(path, str):
            return {"library": [module, path]}
        return {"value": self.encode(value)}


def _run_coroutine(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **_CONVERSIONS,
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "isinstance": isinstance,
    "await": _run_coroutine,
    "method": lambda target, name, *args: getattr(target, name)(*args),
    "binary": lambda left, name, right: getattr(operator, f"__{name}__")(left, right),
    "unary": lambda target, name: getattr(operator, f"__{name}__")(target),
}


def serve() -> None:
    """Load the program when asked, and answer calls until the checking process is gone."""
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    peer = ProgramPeer(incoming, outgoing)
    while (message := peer.receive()) is not None:
        peer.answer(message)


# -- the checking process -------------------------------------------------------------------


class TestPeer(Peer):
    """The tests' end: calls the program, and lets it call the functions that were passed to it."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        super().__init__(incoming, outgoing)
        self.exceptions: dict[str, type[BaseException]] = {}

    def request(self, op: str, target: Any, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> Any:
        passed = [list(args), dict(named or {})]
        reply = self.ask(op, target, *passed) if op == "call" else self.ask(op, target, *args)
        if "result" not in reply:
            error = self.decode_exception(reply, self.exceptions)
            if isinstance(error, StopIteration) and op != "next":
                error = RuntimeError("the program raised StopIteration")  # it would end a loop of the test early
            raise error
        if "changed" in reply:
            _merge(passed, self.decode(reply["changed"]))
        return self.decode(reply["result"])

    def run(self, op: str, args: list[Any]) -> dict[str, Any]:
        function, positional, named = args
        if op != "callback":
            raise TypeError("only functions of the test can be called")
        return {"result": self.encode(function(*positional, **named))}

    def encode(self, value: Any) -> Any:
        if type(value).__module__ in _ITERATORS and hasattr(type(value), "__next__"):
            return {"iterator": [self.encode(item) for item in value]}
        return super().encode(value)

    def encode_reference(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, _ROUTINES):
            raise TypeError(f"a {type(value).__name__} of the test cannot be passed to the program")
        return super().encode_reference(value)


class TestNamespace:
    """The names a test finds: its own, those of ``before``, Python's, then the program's.

    A name of Python's that the program took is the program's only in a test that uses no other name of the program:
    ``abs`` in a test of ``f`` is Python's, whatever the program defines.
    """

    def __init__(self, peer: TestPeer, before: str, entry_point: str) -> None:
        self._peer = peer
        self._entry_point = entry_point
        self._values: dict[str, Any] = {"__name__": "tests"}
        self._program: dict[str, Any] = {}
        self._taken: dict[str, Any] = {}
        self._run_before(before)

    def _run_before(self, before: str) -> None:
        """Define what comes before the program: it is the task's, so the tests have a copy of their own."""
        try:
            exec(compile(before, "before", "exec"), self._values)
        except Exception as error:  # the program continues it in the middle of a statement, or fails on it too
            sys.stderr.write(f"before the program: {type(error).__name__}\n")
        self._values.pop(self._entry_point, None)
        self._peer.shared = {name: value for name, value in self._values.items() if isinstance(value, type)}

    def load(self) -> BaseException | None:
        """Load the program; returns the exception it raised, if any."""
        reply = self._peer.ask("load", list(self._peer.shared))
        names = reply.get("names")
        if not isinstance(names, dict):
            return self._peer.decode_exception(reply, {})
        for name, description in names.items():
            if name in self._values or not isinstance(description, dict):
                continue
            value = self._bring(name, description)
            if not {"module", "library"} & set(description):
                self._program[name] = value
            is_pythons = hasattr(builtins, name) or name in _LIBRARY
            known = self._taken if is_pythons and name != self._entry_point else self._values
            known[name] = value
        module = types.ModuleType("solution")
        vars(module).update(self._program)
        sys.modules["solution"] = module
        for name in self._taken.keys() & _LIBRARY:
            self._values[name] = importlib.import_module(name)
        return None

    def run(self, code: types.CodeType) -> None:
        """Run one test."""
        own = _collect_names(code) & self._program.keys()
        taken = {name: self._taken[name] for name in own & self._taken.keys()} if len(own) == 1 else {}
        held = {name: self._values[name] for name in taken if name in self._values}
        self._values.update(taken)
        try:
            exec(code, self._values)
        finally:
            for name in taken:
                self._values.pop(name, None)
            self._values.update(held)

    def _bring(self, name: str, description: Mapping[str, Any]) -> Any:
        if "module" in description or "library" in description:
            return _find_in_library(description)
        if isinstance(bases := description.get("exception"), list):
            kinds = [getattr(builtins, str(base), None) for base in bases]
            base = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)), None)
            made: Any = type(name, (base or Exception,), {})
            self._peer.exceptions[name] = made
            return made
        return self._peer.decode(description.get("value"))


def _find_in_library(description: Mapping[str, Any]) -> Any:
    """The standard library's own object of that name; None where it has none."""
    module, path = (description["module"], "") if "module" in description else description["library"]
    if str(module).partition(".")[0] not in (sys.stdlib_module_names if not path else _LIBRARY):
        return None
    try:
        found = importlib.import_module(module)
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def _collect_names(code: types.CodeType) -> set[str]:
    """All names that code uses, in its functions too."""
    nested = [_collect_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*nested)


def check() -> None:
    """Run the tests, and write the verdicts: an empty text, or the name of the exception."""
    chunks: list[bytes] = []
    while chunk := os.read(0, 1 << 16):
        chunks.append(chunk)
    request = json.loads(b"".join(chunks))
    results = os.dup(1)
    os.dup2(2, 1)
    namespace = TestNamespace(TestPeer(ANSWERS, CALLS), request["before"], request["entry_point"])
    try:
        failed = namespace.load()
    except ProgramError as error:
        failed = error
    verdicts: list[str] = []
    for number, test in enumerate(request["tests"]):
        try:
            if failed is not None:
                raise failed
            namespace.run(compile(test, f"test {number}", "exec"))
            verdicts.append("")
        except BaseException as error:  # the program may raise anything, SystemExit too
            verdicts.append(type(error).__name__)
            if len(verdicts) == 1 or verdicts[-2] == "":
                sys.stderr.write(f"test {number}: {type(error).__name__}: {str(error)[:200]}\n")
    sys.stderr.flush()
    rest = memoryview(json.dumps(verdicts).encode())
    while rest:
        rest = rest[os.write(results, rest) :]
    os._exit(0)


if __name__ == "__main__":
    sys.setrecursionlimit(_MAX_DEPTH)
    {"check": check, "serve": serve}[sys.argv[1]]()
