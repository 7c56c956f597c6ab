"""Number formatting for terminals: short numbers, durations, sparklines, and the parity status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits, with an exponent only for tiny values.

    >>> format_number(0.41237), format_number(12.0), format_number(1.2e-7), format_number(0.0)
    ('0.412', '12', '1.2e-07', '0')
    """
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-3:
        return f"{value:.{max(digits - 2, 0)}e}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def format_fixed(value: float, places: int = 3) -> str:
    """Format a number with a fixed number of decimals, so that columns align.

    >>> format_fixed(0.5), format_fixed(-0.00001)
    ('0.500', '0.000')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value if round(value, places) else 0.0:.{places}f}"


def format_count(value: float) -> str:
    """Format a count with a suffix for thousands, millions and so on.

    >>> [format_count(n) for n in (7, 950, 1234, 18_600, 250_000, 999_960, 3.2e9)]
    ['7', '950', '1.2k', '18.6k', '250k', '1.0M', '3.2G']
    """
    if not math.isfinite(value):
        return str(value)
    for suffix in ("", "k", "M", "G", "T"):
        text = f"{value:.0f}" if not suffix or abs(value) >= 99.95 else f"{value:.1f}"
        if abs(float(text)) < 1000 or suffix == "T":
            return text + suffix
        value /= 1000
    raise AssertionError("the last suffix always returns")


def format_duration(seconds: float) -> str:
    """Format a duration in its two leading units.

    >>> [format_duration(s) for s in (0.04, 8.26, 75, 3725, 200_000)]
    ['0.0s', '8.3s', '1m15s', '1h02m', '2d07h']
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    minutes, hours = rounded // 60, rounded // 3600
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes % 60:02d}m" if hours else f"{minutes}m{rounded % 60:02d}s"


def format_bytes(value: float) -> str:
    """Format bytes in binary units.

    >>> format_bytes(512), format_bytes(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def sparkline(values: Sequence[float], width: int = 12, *, blocks: str = BLOCKS) -> str:
    """Draw the last ``width`` values as blocks scaled between their minimum and maximum; NaN is a dot.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7]), sparkline([2, 2]), sparkline([])
    ('▁▂▃▄▅▆▇█', '▁▁', '')
    """
    shown = list(values)[-width:] if width > 0 else []
    real = [v for v in shown if math.isfinite(v)]
    low, high = (min(real), max(real)) if real else (0.0, 0.0)
    spread = high / 2 - low / 2  # halves, because the difference of two huge numbers may overflow
    heights = [(v / 2 - low / 2) / spread if spread and math.isfinite(v) else 0.0 for v in shown]
    top = len(blocks) - 1
    return "".join(blocks[round(h * top)] if math.isfinite(v) else "·" for v, h in zip(shown, heights, strict=True))


class ParityStatus(StrEnum):
    """Agreement of engine and trainer log-probs."""

    OK = "ok"
    WARN = "warn"
    RED = "red"


def classify_parity(mean_abs: float, tolerance: float = 0.01) -> ParityStatus:
    """Return red above ``tolerance`` (mean |Δ log-prob|) or for NaN, yellow above a tenth of it, else green."""
    if not mean_abs <= tolerance:
        return ParityStatus.RED
    return ParityStatus.WARN if mean_abs > tolerance / 10 else ParityStatus.OK
