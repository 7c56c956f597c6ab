"""Numbers as people read them in a terminal: short figures, durations, sparklines, and the parity light."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


def figure(value: float, digits: int = 3) -> str:
    """A number in few characters: ``digits`` significant, an exponent only where zeros would hide it.

    >>> figure(0.41237), figure(12.0), figure(1.2e-7), figure(0.0)
    ('0.412', '12', '1.2e-07', '0')
    """
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.{max(digits - 2, 0)}e}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def fixed(value: float, places: int = 3) -> str:
    """A number with a fixed count of decimals, so that a column of them stays in line.

    >>> fixed(0.5), fixed(-0.00001)
    ('0.500', '0.000')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value if round(value, places) else 0.0:.{places}f}"


def count(value: float) -> str:
    """A count with a suffix for thousands, millions and so on.

    >>> [count(n) for n in (7, 950, 1234, 18_600, 250_000, 999_960, 3.2e9)]
    ['7', '950', '1.2k', '18.6k', '250k', '1.0M', '3.2G']
    """
    if not math.isfinite(value):
        return str(value)
    for suffix in ("", "k", "M", "G", "T"):
        shown = f"{value:.0f}" if not suffix or abs(value) >= 99.95 else f"{value:.1f}"
        if abs(float(shown)) < 1000 or suffix == "T":
            return shown + suffix
        value /= 1000
    raise AssertionError("the last suffix always returns")


def duration(seconds: float) -> str:
    """A span of time in its two leading units.

    >>> [duration(s) for s in (0.04, 8.26, 75, 3725, 200_000)]
    ['0.0s', '8.3s', '1m15s', '1h02m', '2d07h']
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes % 60:02d}m" if hours else f"{minutes}m{whole % 60:02d}s"


def size(value: float) -> str:
    """Bytes in binary units.

    >>> size(512), size(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def sparkline(values: Sequence[float], width: int = 12, *, blocks: str = BLOCKS) -> str:
    """The last ``width`` values as a row of blocks between their smallest and largest; one that is no number is a dot.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7]), sparkline([2, 2]), sparkline([])
    ('▁▂▃▄▅▆▇█', '▁▁', '')
    """
    shown = list(values)[-width:] if width > 0 else []
    real = [v for v in shown if math.isfinite(v)]
    low, high = (min(real), max(real)) if real else (0.0, 0.0)
    spread = high / 2 - low / 2  # halves, for the difference of two huge numbers is no number
    heights = [(v / 2 - low / 2) / spread if spread and math.isfinite(v) else 0.0 for v in shown]
    top = len(blocks) - 1
    return "".join(blocks[round(h * top)] if math.isfinite(v) else "·" for v, h in zip(shown, heights, strict=True))


class Light(StrEnum):
    """How far engine and trainer agree, at a glance."""

    OK = "ok"
    WARN = "warn"
    RED = "red"


def parity_light(mean_abs: float, tolerance: float = 0.01) -> Light:
    """Red above ``tolerance`` (mean |Δ log-prob|) or when it is no number, yellow above a tenth of it, else green."""
    if not mean_abs <= tolerance:
        return Light.RED
    return Light.WARN if mean_abs > tolerance / 10 else Light.OK
