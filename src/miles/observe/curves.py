"""The picture of a run: reward over steps, and below it what tells whether to believe it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles.observe.line import eval_rewards
from miles.observe.read import Rows, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# the Okabe-Ito colours, told apart by all common kinds of colour vision
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
INK, FAINT = "#22272e", "#d8dee4"
EVAL_MARKS = ((VERMILION, "o"), (GREEN, "s"), (PURPLE, "D"), (ORANGE, "^"))

# the parity panel's floor: below what single precision can tell apart
PARITY_FLOOR = 1e-9


def draw_curves(metrics_jsonl: Path, png: Path, title: str) -> bool:
    """Draw a run's ``metrics.jsonl`` as a PNG; false, and no picture, when it holds nothing to draw.

    Lines that cannot be read are passed over.
    """
    rows = read_rows(metrics_jsonl)
    if not rows.rows:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1), gridspec_kw={"hspace": 0.12})
    _rewards(top, rows)
    _health(low, rows)
    _dress(figure, (top, low), title)
    part = png.with_suffix(".part")
    _save_small(figure, part)
    part.rename(png)
    return True


def _save_small(figure: Figure, path: Path) -> None:
    """A PNG of few colours: a third of the bytes, and the eye does not miss the rest."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight", pad_inches=0.15)
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """A mean over ``reach`` neighbours on both sides, the nearest weighing most, so that the curve does not lag.

    >>> smooth([1.0, 1.0, 1.0], 10), smooth([0.0, float("nan"), 1.0], 1)
    ([1.0, 1.0, 1.0], [0.0, 0.5, 1.0])
    """
    raw = np.asarray(values, np.float64)
    real = np.isfinite(raw)
    kernel = reach + 1.0 - np.abs(np.arange(-reach, reach + 1))
    here = slice(reach, reach + len(raw))
    weight = np.convolve(real.astype(np.float64), kernel)[here]
    total = np.convolve(np.where(real, raw, 0.0), kernel)[here]
    return np.divide(total, weight, out=np.full(len(raw), np.nan), where=weight > 0).tolist()


def _rewards(axes: Axes, rows: Rows) -> None:
    """Training reward, raw and smoothed, and the held-out rewards as marks."""
    steps, values = rows.series("train", "reward")
    if steps:
        axes.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1)
        axes.plot(steps, smooth(values, len(values) // 25), color=BLUE, linewidth=2.2, label="training")
    held_out: dict[str, list[tuple[int, float]]] = {}
    for row in rows.of("eval"):
        for name, value in eval_rewards(row.values).items():
            held_out.setdefault(name, []).append((row.step, value))
    for number, (name, points) in enumerate(held_out.items()):
        colour, mark = EVAL_MARKS[number % len(EVAL_MARKS)]
        at, height = [step for step, _ in points], [value for _, value in points]
        label = "held out" if len(held_out) == 1 else f"held out: {name}"
        axes.plot(at, height, color=colour, marker=mark, markersize=5, linewidth=1.4, label=label, clip_on=False)
        if len(held_out) == 1:
            _say_ends(axes, points, colour)
    axes.set_ylabel("reward")
    seen = [v for v in (*values, *(v for points in held_out.values() for _, v in points)) if math.isfinite(v)]
    if seen and min(seen) >= 0 and max(seen) <= 1:
        axes.set_ylim(0, 1.06)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=True, facecolor="white", edgecolor="white", framealpha=0.85)


def _say_ends(axes: Axes, points: Sequence[tuple[int, float]], colour: str) -> None:
    """The first and the last held-out reward, as numbers."""
    ends = [points[0], points[-1]] if len(points) > 1 else [points[0]]
    for step, value in ends:
        if math.isfinite(value):
            axes.annotate(
                f"{value:.2f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, 8),
                ha="center",
                color=colour,
                fontweight="bold",
            )


def _parity(axes: Axes, steps: Sequence[int], gaps: Sequence[float]) -> list[Line2D]:
    """The gap between engine and trainer; a log scale has no zero, so one that is exactly zero lies on the floor."""
    if not steps:
        return []
    exact = not any(gaps)
    shown = [max(gap, PARITY_FLOOR) for gap in gaps]
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_ylabel("parity", color=GREEN)
    real = [gap for gap in shown if math.isfinite(gap)]
    if real:
        axes.set_ylim(min(real) / 4, max(real) * 40)
    if exact:
        axes.set_yticks([PARITY_FLOOR], ["0"])
    label = "engine vs trainer, mean |Δ log-prob|" + (": exactly 0" if exact else "")
    return axes.plot(steps, shown, color=GREEN, linewidth=1.4, label=label)


def _health(axes: Axes, rows: Rows) -> None:
    """Parity on the left (log scale), entropy or failing that response length on the right."""
    handles = _parity(axes, *rows.series("train", "parity_mean_abs"))
    for name, unit in (("entropy", "entropy (nats)"), ("response_length", "length (tokens)")):
        steps, values = rows.series("train", name)
        if steps:
            right = axes.twinx()
            handles += right.plot(steps, values, color=ORANGE, linewidth=1.4, label=unit)
            right.set_ylabel(unit.split()[0], color=ORANGE)
            right.set_ylim(bottom=0, top=1.45 * max((v for v in values if math.isfinite(v)), default=1.0) or 1.0)
            right.tick_params(colors=INK, length=0)
            right.spines[:].set_visible(False)
            break
    if handles:
        axes.legend(handles=handles, loc="upper right", frameon=False, ncols=2)
    axes.set_xlabel("training step")


def _dress(figure: Figure, panels: Sequence[Axes], title: str) -> None:
    """One look: few lines, dark text on white, whole steps on the axis."""
    from matplotlib.ticker import MaxNLocator

    panels[0].set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=10)
    for axes in panels:
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, length=0)
        axes.margins(x=0.02)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(panels)
