"""Figures a person can read, whatever the number."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from miles.observe import formatting, step_line, summary
from miles.observe.formatting import (
    BLOCKS,
    ParityStatus,
    classify_parity,
    format_bytes,
    format_count,
    format_duration,
    format_fixed,
    format_number,
    sparkline,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)


def test_the_examples_in_the_docstrings_hold():
    import doctest

    for module in (formatting, step_line, summary):
        assert doctest.testmod(module).failed == 0


def test_the_classify_parity_is_green_yellow_red_at_a_tenth_and_at_the_tolerance():
    assert [classify_parity(gap, 0.01) for gap in (0.0, 1e-7, 0.001)] == [ParityStatus.OK] * 3
    assert [classify_parity(gap, 0.01) for gap in (math.nextafter(0.001, 1), 0.01)] == [ParityStatus.WARN] * 2
    assert [classify_parity(gap, 0.01) for gap in (math.nextafter(0.01, 1), 5.0, math.inf, math.nan)] == [
        ParityStatus.RED
    ] * 4
    assert classify_parity(0.0, 0.0) is ParityStatus.OK and classify_parity(1e-12, 0.0) is ParityStatus.RED


@given(ANY)
def test_no_number_breaks_a_figure(value):
    for shown in (
        format_number(value),
        format_fixed(value),
        format_count(value),
        format_duration(abs(value)),
        format_bytes(abs(value)),
    ):
        assert shown


@given(st.floats(1e-12, 1e12))
def test_a_figure_reads_back_close_to_its_number(value):
    assert abs(float(format_number(value)) - value) <= 0.051 * value


@given(st.lists(ANY, max_size=40), st.integers(0, 30))
@example([-1.7e308, 1.7e308, 0.0], 3)
@example([0.0, 5e-324], 3)
def test_a_sparkline_is_as_long_as_it_may_be_and_keeps_order(values, width):
    shown = sparkline(values, width)
    assert len(shown) == min(len(values), width)
    tail = values[-width:] if width else []
    pairs = [(v, BLOCKS.index(c)) for v, c in zip(tail, shown, strict=True) if c != "·"]
    assert sorted(h for _, h in pairs) == [h for _, h in sorted(pairs)]
