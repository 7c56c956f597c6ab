"""The calculator computes as Python does, and runs nothing."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.tools.calculator import build_calculator_tool, evaluate_expression
from miles.rollout.tools.tool import ToolError

NUMBERS = st.one_of(st.integers(-999, 999), st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3)))
EXPRESSIONS = st.recursive(
    NUMBERS.map(str),
    lambda inner: st.builds(lambda a, op, b: f"({a} {op} {b})", inner, st.sampled_from("+-*/"), inner),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_expressions_have_the_value_python_gives_them(expression):
    try:
        wanted = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError):
            evaluate_expression(expression)
        return
    assert evaluate_expression(expression) == pytest.approx(wanted, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("2^10", "1024"),
        ("0.1 + 0.2", "0.3"),
        ("6/3", "2"),
        ("10**20 / 10**2", str(10**18)),
        ("17 % 5 + 17 // 5", "5"),
        ("sqrt(2)", "1.4142135623731"),
        ("factorial(20)", str(math.factorial(20))),
        ("round(2.675, 1)", "2.7"),
        ("max(1, 2, -3) * pi", "6.28318530717959"),
        ("3 × 4 ÷ 6 − 1", "1"),
        ("1/3", "0.333333333333333"),
    ],
)
def test_results_are_written_as_one_would_write_them(expression, said):
    assert asyncio.run(build_calculator_tool().call({"expression": expression})) == said


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "(1).__class__",
        "[x for x in (1, 2)]",
        "'a' * 3",
        "lambda: 1",
        "abs",
        "True",
        "1j",
        "(-8) ** 0.5",
        "9 ** 9 ** 9",
        "2 ** -99999999",
        "factorial(10 ** 9)",
        "1 / 0",
        "sqrt(-1)",
        "sin(1, 2)",
        "1e308 * 10 ** 400",
        "(" * 300 + "1" + ")" * 300,
        "-" * 900 + "1",
        "1 +",
        "",
        "9" * 2000,
        "factorial(inf)",
        "floor(inf)",
    ],
)
def test_what_is_no_arithmetic_or_too_much_of_it_is_refused(expression):
    try:
        value = evaluate_expression(expression)
    except ToolError:
        return
    assert expression.strip("-()") == "1" and abs(value) == 1  # deep, but Python's parser took it
