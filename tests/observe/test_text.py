"""Figures a person can read, whatever the number."""

import math

from hypothesis import example, given
from hypothesis import strategies as st

from miles.observe import line, summary, text
from miles.observe.text import BLOCKS, Light, count, duration, figure, fixed, parity_light, size, sparkline

ANY = st.floats(allow_nan=True, allow_infinity=True)


def test_the_examples_in_the_docstrings_hold():
    import doctest

    for module in (text, line, summary):
        assert doctest.testmod(module).failed == 0


def test_the_parity_light_is_green_yellow_red_at_a_tenth_and_at_the_tolerance():
    assert [parity_light(gap, 0.01) for gap in (0.0, 1e-7, 0.001)] == [Light.OK] * 3
    assert [parity_light(gap, 0.01) for gap in (math.nextafter(0.001, 1), 0.01)] == [Light.WARN] * 2
    assert [parity_light(gap, 0.01) for gap in (math.nextafter(0.01, 1), 5.0, math.inf, math.nan)] == [Light.RED] * 4
    assert parity_light(0.0, 0.0) is Light.OK and parity_light(1e-12, 0.0) is Light.RED


@given(ANY)
def test_no_number_breaks_a_figure(value):
    for shown in (figure(value), fixed(value), count(value), duration(abs(value)), size(abs(value))):
        assert shown


@given(st.floats(1e-12, 1e12))
def test_a_figure_reads_back_close_to_its_number(value):
    assert abs(float(figure(value)) - value) <= 0.051 * value


@given(st.lists(ANY, max_size=40), st.integers(0, 30))
@example([-1.7e308, 1.7e308, 0.0], 3)
@example([0.0, 5e-324], 3)
def test_a_sparkline_is_as_long_as_it_may_be_and_keeps_order(values, width):
    shown = sparkline(values, width)
    assert len(shown) == min(len(values), width)
    tail = values[-width:] if width else []
    pairs = [(v, BLOCKS.index(c)) for v, c in zip(tail, shown, strict=True) if c != "·"]
    assert sorted(h for _, h in pairs) == [h for _, h in sorted(pairs)]
