"""Summary at the end of a run: reward curves, time, tokens, and example responses before and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from miles.observe.formatting import (
    ASCII_BLOCKS,
    BLOCKS,
    format_count,
    format_duration,
    format_fixed,
    format_number,
    sparkline,
)
from miles.observe.log_reader import LogRows
from miles.observe.step_line import eval_rewards, step_seconds
from miles.observe.view import supports_cursor, supports_unicode


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """Responses to one prompt before and after training, with their rewards."""

    prompt: str
    before: str
    after: str
    reward_before: float | None = None
    reward_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCurve:
    """A reward over the steps of a run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def best(self) -> tuple[int, float]:
        """The first step with the largest value, and that value."""
        finite = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        return max(finite, key=lambda point: point[1]) if finite else (self.steps[0], math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The contents of the summary."""

    folder: Path
    steps: int
    held_out: tuple[RewardCurve, ...]
    training: RewardCurve | None
    wall_seconds: float | None
    rollout_tokens: float
    train_tokens: float
    worst_parity: float | None
    examples: tuple[BeforeAfter, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()


def summarise(
    metrics: LogRows,
    *,
    folder: Path,
    timings: LogRows | None = None,
    wall_seconds: float | None = None,
    examples: Sequence[BeforeAfter] = (),
    commands: Sequence[tuple[str, str]] = (),
) -> Summary:
    """Build a run's summary. ``commands`` are (command, purpose); without ``wall_seconds`` the timings are summed."""
    train = metrics.select("train")
    if wall_seconds is None and timings is not None:
        train_seconds = [step_seconds(row.values) or 0.0 for row in timings.select("train")]
        wall_seconds = sum(train_seconds) + sum(row.values.get("evaluate", 0.0) for row in timings.select("eval"))
    gaps = metrics.series("train", "parity_mean_abs")[1]
    return Summary(
        folder=folder,
        steps=len(train),
        held_out=_build_held_out_curves(metrics),
        training=_build_curve("training", *metrics.series("train", "reward")),
        wall_seconds=wall_seconds,
        rollout_tokens=sum(row.values.get("rollout_tokens", 0.0) for row in train),
        train_tokens=sum(row.values.get("train_tokens", row.values.get("tokens", 0.0)) for row in train),
        worst_parity=max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap) if gaps else None,
        examples=tuple(examples),
        commands=tuple(commands),
    )


def _build_held_out_curves(metrics: LogRows) -> tuple[RewardCurve, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in metrics.select("eval"):
        for name, value in eval_rewards(row.values).items():
            points.setdefault(name, []).append((row.step, value))
    curves = [_build_curve(name, [s for s, _ in seen], [v for _, v in seen]) for name, seen in points.items()]
    return tuple(curve for curve in curves if curve is not None)


def _build_curve(name: str, steps: Sequence[int], values: Sequence[float]) -> RewardCurve | None:
    return RewardCurve(name=name, steps=tuple(steps), values=tuple(values)) if steps else None


def list_facts(summary: Summary, *, blocks: str = BLOCKS) -> list[tuple[str, str]]:
    """Return the summary as (label, value) rows."""
    rows: list[tuple[str, str]] = []
    for curve in summary.held_out:
        label = "held-out reward" if len(summary.held_out) == 1 else f"held-out reward, {curve.name}"
        rows.append((label, _format_curve(curve, blocks)))
    if summary.training is not None:
        rows.append(("training reward", _format_curve(summary.training, blocks)))
    time = "" if summary.wall_seconds is None else f" in {format_duration(summary.wall_seconds)}"
    rows.append(("trained", f"{summary.steps} step{'' if summary.steps == 1 else 's'}{time}"))
    if summary.rollout_tokens or summary.train_tokens:
        rows.append(
            (
                "tokens",
                f"{format_count(summary.rollout_tokens)} sampled, {format_count(summary.train_tokens)} trained on",
            )
        )
    if summary.worst_parity is not None:
        rows.append(("worst parity", f"{format_number(summary.worst_parity, 2)} mean |Δ log-prob|"))
    rows.append(("run directory", str(summary.folder)))
    return rows


def _format_curve(curve: RewardCurve, blocks: str) -> str:
    first = curve.values[0]
    last = curve.values[-1]
    (best_step, best) = curve.best
    if len(curve.values) == 1:
        return format_fixed(first)
    peak = "" if best == last else f" (best {format_fixed(best)} at step {best_step})"
    spark = sparkline(_subsample(curve.values, 24), 24, blocks=blocks)
    return f"{format_fixed(first)} -> {format_fixed(last)}{peak}  {spark}"


def _subsample(values: Sequence[float], limit: int) -> list[float]:
    """Return at most ``limit`` values, evenly spaced, including the first and the last."""
    if len(values) <= limit:
        return list(values)
    return [values[round(n * (len(values) - 1) / (limit - 1))] for n in range(limit)]


def summary_text(summary: Summary, *, blocks: str = BLOCKS) -> str:
    """Return the summary as plain text."""
    rows = list_facts(summary, blocks=blocks)
    width = max(len(label) for label, _ in rows)
    lines = [f"{label.ljust(width)}  {value}" for label, value in rows]
    if summary.examples:
        lines += ["", "before and after"]
        for example in summary.examples:
            lines += [
                f"  prompt  {_one_line(example.prompt)}",
                f"  before  {_format_response(example.before, example.reward_before)}",
                f"  after   {_format_response(example.after, example.reward_after)}",
            ]
    if summary.commands:
        lines += ["", "next"]
        width = max(len(command) for command, _ in summary.commands)
        lines += [f"  {command.ljust(width)}  {purpose}".rstrip() for command, purpose in summary.commands]
    return "\n".join(lines) + "\n"


def print_summary(summary: Summary, stream: TextIO, *, plain: bool = False) -> None:
    """Print the summary: as tables on a terminal, as ``plain`` text elsewhere."""
    if plain or not (supports_cursor(stream) and supports_unicode(stream)):
        encoding = getattr(stream, "encoding", None) or "ascii"
        blocks = BLOCKS if supports_unicode(stream) else ASCII_BLOCKS
        stream.write(summary_text(summary, blocks=blocks).encode(encoding, "replace").decode(encoding))
        stream.flush()
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    grid = Table.grid(padding=(0, 2))
    for label, value in list_facts(summary):
        bold = "bold" if label.startswith("held-out") else ""
        grid.add_row(Text(label, style="dim"), Text(value, style=bold))
    console.print(grid)
    if summary.examples:
        table = Table("prompt", "before", "reward", "after", "reward", box=SIMPLE_HEAD, pad_edge=False)
        for example in summary.examples:
            cells = (
                example.prompt,
                example.before,
                _format_reward(example.reward_before),
                example.after,
                _format_reward(example.reward_after),
            )
            table.add_row(*(Text(_one_line(cell, 200), overflow="fold") for cell in cells))
        console.print(table)
    if summary.commands:
        steps = Table.grid(padding=(0, 2))
        for command, purpose in summary.commands:
            steps.add_row(Text(f"  {command}", style="bold"), Text(purpose, style="dim"))
        console.print(Text("next", style="dim"))
        console.print(steps)


def _format_response(text: str, reward: float | None) -> str:
    return _one_line(text) + (f"   [{format_number(reward)}]" if reward is not None else "")


def _format_reward(reward: float | None) -> str:
    return "" if reward is None else format_number(reward)


def _one_line(text: str, limit: int = 100) -> str:
    """Escape line ends and control characters, and truncate to ``limit`` characters.

    >>> _one_line("a\\nb" + 200 * "c", 8)
    'a\\\\nbcccc...'
    """
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return plain if len(plain) <= limit else plain[:limit] + "..."
