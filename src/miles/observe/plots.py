"""Plot of a run: reward over steps, and below it parity and entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from miles.observe.log_reader import LogRows, read_rows
from miles.observe.step_line import eval_rewards

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# the Okabe-Ito colours, distinguishable with colour blindness
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
INK, FAINT = "#22272e", "#d8dee4"
EVAL_MARKERS = ((VERMILION, "o"), (GREEN, "s"), (PURPLE, "D"), (ORANGE, "^"))

# lower limit of the parity panel, below float32 resolution
PARITY_FLOOR = 1e-9


def plot_curves(metrics_jsonl: Path, png: Path, title: str) -> bool:
    """Plot a run's ``metrics.jsonl`` as a PNG; returns False, without a file, if there is nothing to plot.

    Unreadable lines are skipped.
    """
    rows = read_rows(metrics_jsonl)
    if not rows.rows:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1), gridspec_kw={"hspace": 0.12})
    _plot_rewards(top, rows)
    _plot_health(bottom, rows)
    _style(figure, (top, bottom), title)
    part = png.with_suffix(".part")
    _save_png(figure, part)
    part.rename(png)
    return True


def _save_png(figure: Figure, path: Path) -> None:
    """Save as a PNG with a palette of few colours: a third of the bytes."""
    from PIL import Image

    buffer = BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.15)
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """Smooth with a triangular kernel over ``reach`` neighbours on both sides, so that the curve does not lag.

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


def _plot_rewards(axes: Axes, rows: LogRows) -> None:
    """Plot training reward, raw and smoothed, and the held-out rewards as markers."""
    steps, values = rows.series("train", "reward")
    if steps:
        axes.plot(steps, values, color=BLUE, alpha=0.28, linewidth=1)
        axes.plot(steps, smooth(values, len(values) // 25), color=BLUE, linewidth=2.2, label="training")
    held_out: dict[str, list[tuple[int, float]]] = {}
    for row in rows.select("eval"):
        for name, value in eval_rewards(row.values).items():
            held_out.setdefault(name, []).append((row.step, value))
    for number, (name, points) in enumerate(held_out.items()):
        colour, marker = EVAL_MARKERS[number % len(EVAL_MARKERS)]
        eval_steps, eval_values = [step for step, _ in points], [value for _, value in points]
        label = "held out" if len(held_out) == 1 else f"held out: {name}"
        axes.plot(
            eval_steps,
            eval_values,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.4,
            label=label,
            clip_on=False,
        )
        if len(held_out) == 1:
            _annotate_ends(axes, points, colour)
    axes.set_ylabel("reward")
    finite = [v for v in (*values, *(v for points in held_out.values() for _, v in points)) if math.isfinite(v)]
    if finite and min(finite) >= 0 and max(finite) <= 1:
        axes.set_ylim(0, 1.06)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=True, facecolor="white", edgecolor="white", framealpha=0.85)


def _annotate_ends(axes: Axes, points: Sequence[tuple[int, float]], colour: str) -> None:
    """Annotate the first and the last held-out reward."""
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


def _plot_parity(axes: Axes, steps: Sequence[int], gaps: Sequence[float]) -> list[Line2D]:
    """Plot the log-prob gap of engine and trainer on a log scale, with exact zeros at the lower limit."""
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


def _plot_health(axes: Axes, rows: LogRows) -> None:
    """Plot parity on the left axis (log scale), entropy or else response length on the right."""
    handles = _plot_parity(axes, *rows.series("train", "parity_mean_abs"))
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


def _style(figure: Figure, panels: Sequence[Axes], title: str) -> None:
    """Apply a common style: few lines, dark text on white, integer steps."""
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
