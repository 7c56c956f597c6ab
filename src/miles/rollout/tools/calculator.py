"""Arithmetic for a model: expressions are read as a tree of a few known parts and never run as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from miles.rollout.tools.tool import Tool, ToolError

_LONGEST = 1000  # characters of an expression
_MOST_BITS = 8192  # of a whole number, on the way and at the end
_Number = int | float

_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}
_WRITTEN = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "·": "*", "π": "pi"})


def calculator() -> Tool:
    """The tool ``calculator``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return written(value_of(arguments["expression"]))

    return Tool(
        name="calculator",
        description="Evaluate an arithmetic expression, such as (3 + 4) * sqrt(2) or 17 % 5.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression to evaluate."}},
            "required": ["expression"],
        },
        call=call,
    )


def value_of(expression: str) -> _Number:
    """The number an expression stands for; ToolError when it stands for none.

    >>> value_of("2^10 - 24"), value_of("sqrt(16) / 8")
    (1000, 0.5)
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"an expression may have {_LONGEST} characters, and this has {len(expression)}")
    try:
        tree = ast.parse(expression.translate(_WRITTEN).strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        what = "is not an expression" if isinstance(error, SyntaxError) else f"cannot be computed ({error})"
        raise ToolError(f"{expression!r} {what}") from error
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ToolError(f"{expression!r} cannot be computed ({error})") from error


def written(value: _Number) -> str:
    """As one would write it: whole numbers in full, others with the fifteen digits a float is sure of."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _small(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _small(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _small(_FUNCTIONS[name](*map(_value, args)))
        case _:
            known = f"numbers, + - * / // % **, {', '.join(_CONSTANTS)} and {', '.join(_FUNCTIONS)}"
            raise ToolError(f"{ast.unparse(node)!r} is not arithmetic; there are {known}")


def _small(value: _Number) -> _Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ToolError("a number on the way is too large")
    return value


def _power(base: _Number, exponent: _Number) -> _Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and int(base).bit_length() * abs(exponent) > 2 * _MOST_BITS:
        raise ToolError("a number on the way is too large")
    return base**exponent


def _factorial(n: _Number) -> int:
    if n > 900:  # has more than the bits that are allowed
        raise ToolError("a number on the way is too large")
    if n != int(n):
        raise ToolError("only whole numbers have a factorial")
    return math.factorial(int(n))


def _divided(a: _Number, b: _Number) -> _Number:
    """Exact where it can be: a quotient of whole numbers may have more digits than a float."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    return a / b


def _rounded(value: _Number, digits: _Number = 0) -> _Number:
    return round(value, int(digits))


_OPERATORS: Mapping[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _rounded,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": min,
    "max": max,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "factorial": _factorial,
    "gcd": math.gcd,
    "lcm": math.lcm,
}
