"""Calculator tool: expressions are parsed as an AST of a few known nodes and never executed as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from miles.rollout.tools.tool import Tool, ToolError

_MAX_CHARS = 1000  # characters of an expression
_MAX_BITS = 8192  # of an integer, including intermediate results
_Number = int | float

_CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}
_NOTATION = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-", "·": "*", "π": "pi"})


def build_calculator_tool() -> Tool:
    """Build the tool ``calculator``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return format_number(evaluate_expression(arguments["expression"]))

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


def evaluate_expression(expression: str) -> _Number:
    """Evaluate an arithmetic expression; ToolError when it is invalid.

    >>> evaluate_expression("2^10 - 24"), evaluate_expression("sqrt(16) / 8")
    (1000, 0.5)
    """
    if len(expression) > _MAX_CHARS:
        raise ToolError(f"an expression may have {_MAX_CHARS} characters, and this has {len(expression)}")
    try:
        tree = ast.parse(expression.translate(_NOTATION).strip(), mode="eval")
        return _evaluate(tree.body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        what = "is not an expression" if isinstance(error, SyntaxError) else f"cannot be computed ({error})"
        raise ToolError(f"{expression!r} {what}") from error
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ToolError(f"{expression!r} cannot be computed ({error})") from error


def format_number(value: _Number) -> str:
    """Format a number: integers in full, floats with the fifteen digits they are accurate to."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _evaluate(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _check_size(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _check_size(_OPERATORS[type(op)](_evaluate(left), _evaluate(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _check_size(_FUNCTIONS[name](*map(_evaluate, args)))
        case _:
            known = f"numbers, + - * / // % **, {', '.join(_CONSTANTS)} and {', '.join(_FUNCTIONS)}"
            raise ToolError(f"{ast.unparse(node)!r} is not arithmetic; there are {known}")


def _check_size(value: _Number) -> _Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ToolError("a number on the way is too large")
    return value


def _power(base: _Number, exponent: _Number) -> _Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and int(base).bit_length() * abs(exponent) > 2 * _MAX_BITS:
        raise ToolError("a number on the way is too large")
    return base**exponent


def _factorial(n: _Number) -> int:
    if n > 900:  # more bits than allowed
        raise ToolError("a number on the way is too large")
    if n != int(n):
        raise ToolError("only whole numbers have a factorial")
    return math.factorial(int(n))


def _divide(a: _Number, b: _Number) -> _Number:
    """Divide exactly where possible: a quotient of integers may have more digits than a float."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    return a / b


def _round(value: _Number, digits: _Number = 0) -> _Number:
    return round(value, int(digits))


_OPERATORS: Mapping[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _round,
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
