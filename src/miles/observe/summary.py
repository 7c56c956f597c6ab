"""The closing words of a run: how far it came, what it cost, what it says now that it did not say before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from miles.observe.line import eval_rewards, step_seconds
from miles.observe.read import Rows
from miles.observe.text import ASCII_BLOCKS, BLOCKS, count, duration, figure, fixed, sparkline
from miles.observe.view import moves, speaks_unicode


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt answered by the policy before and after training, and what the answers earned."""

    prompt: str
    before: str
    after: str
    reward_before: float | None = None
    reward_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How one reward went over the run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def best(self) -> tuple[int, float]:
        """The first step with the largest value, and that value."""
        real = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]
        return max(real, key=lambda point: point[1]) if real else (self.steps[0], math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All the closing words are made of."""

    folder: Path
    steps: int
    held_out: tuple[Course, ...]
    training: Course | None
    wall_seconds: float | None
    rollout_tokens: float
    train_tokens: float
    worst_parity: float | None
    turns: tuple[Turn, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()


def summarise(
    metrics: Rows,
    *,
    folder: Path,
    timings: Rows | None = None,
    wall_seconds: float | None = None,
    turns: Sequence[Turn] = (),
    commands: Sequence[tuple[str, str]] = (),
) -> Summary:
    """Gather a run's end. ``commands`` are (command, purpose); without ``wall_seconds`` the timings are added up."""
    train = metrics.of("train")
    if wall_seconds is None and timings is not None:
        spent = [step_seconds(row.values) or 0.0 for row in timings.of("train")]
        wall_seconds = sum(spent) + sum(row.values.get("evaluate", 0.0) for row in timings.of("eval"))
    gaps = metrics.series("train", "parity_mean_abs")[1]
    return Summary(
        folder=folder,
        steps=len(train),
        held_out=_held_out(metrics),
        training=_course("training", *metrics.series("train", "reward")),
        wall_seconds=wall_seconds,
        rollout_tokens=sum(row.values.get("rollout_tokens", 0.0) for row in train),
        train_tokens=sum(row.values.get("train_tokens", row.values.get("tokens", 0.0)) for row in train),
        worst_parity=max(gaps, key=lambda gap: math.inf if math.isnan(gap) else gap) if gaps else None,
        turns=tuple(turns),
        commands=tuple(commands),
    )


def _held_out(metrics: Rows) -> tuple[Course, ...]:
    points: dict[str, list[tuple[int, float]]] = {}
    for row in metrics.of("eval"):
        for name, value in eval_rewards(row.values).items():
            points.setdefault(name, []).append((row.step, value))
    courses = [_course(name, [s for s, _ in seen], [v for _, v in seen]) for name, seen in points.items()]
    return tuple(course for course in courses if course is not None)


def _course(name: str, steps: Sequence[int], values: Sequence[float]) -> Course | None:
    return Course(name=name, steps=tuple(steps), values=tuple(values)) if steps else None


def facts(summary: Summary, *, blocks: str = BLOCKS) -> list[tuple[str, str]]:
    """The figures, as (what, how much) in reading order."""
    rows: list[tuple[str, str]] = []
    for course in summary.held_out:
        label = "held-out reward" if len(summary.held_out) == 1 else f"held-out reward, {course.name}"
        rows.append((label, _went(course, blocks)))
    if summary.training is not None:
        rows.append(("training reward", _went(summary.training, blocks)))
    time = "" if summary.wall_seconds is None else f" in {duration(summary.wall_seconds)}"
    rows.append(("trained", f"{summary.steps} step{'' if summary.steps == 1 else 's'}{time}"))
    if summary.rollout_tokens or summary.train_tokens:
        rows.append(
            ("tokens", f"{count(summary.rollout_tokens)} sampled, {count(summary.train_tokens)} read in training")
        )
    if summary.worst_parity is not None:
        rows.append(("worst parity", f"{figure(summary.worst_parity, 2)} mean |Δ log-prob|"))
    rows.append(("run directory", str(summary.folder)))
    return rows


def _went(course: Course, blocks: str) -> str:
    first, last, (at, best) = course.values[0], course.values[-1], course.best
    if len(course.values) == 1:
        return fixed(first)
    peak = "" if best == last else f" (best {fixed(best)} at step {at})"
    return f"{fixed(first)} -> {fixed(last)}{peak}  {sparkline(_thinned(course.values, 24), 24, blocks=blocks)}"


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def summary_text(summary: Summary, *, blocks: str = BLOCKS) -> str:
    """The closing words as plain text."""
    rows = facts(summary, blocks=blocks)
    wide = max(len(what) for what, _ in rows)
    lines = [f"{what.ljust(wide)}  {much}" for what, much in rows]
    if summary.turns:
        lines += ["", "before and after"]
        for turn in summary.turns:
            lines += [
                f"  prompt  {_one_line(turn.prompt)}",
                f"  before  {_scored(turn.before, turn.reward_before)}",
                f"  after   {_scored(turn.after, turn.reward_after)}",
            ]
    if summary.commands:
        lines += ["", "next"]
        wide = max(len(command) for command, _ in summary.commands)
        lines += [f"  {command.ljust(wide)}  {purpose}".rstrip() for command, purpose in summary.commands]
    return "\n".join(lines) + "\n"


def print_summary(summary: Summary, stream: TextIO) -> None:
    """Say the closing words: as tables on a terminal, as plain text elsewhere."""
    if not (moves(stream) and speaks_unicode(stream)):
        encoding = getattr(stream, "encoding", None) or "ascii"
        blocks = BLOCKS if speaks_unicode(stream) else ASCII_BLOCKS
        stream.write(summary_text(summary, blocks=blocks).encode(encoding, "replace").decode(encoding))
        stream.flush()
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    grid = Table.grid(padding=(0, 2))
    for what, much in facts(summary):
        bold = "bold" if what.startswith("held-out") else ""
        grid.add_row(Text(what, style="dim"), Text(much, style=bold))
    console.print(grid)
    if summary.turns:
        table = Table("prompt", "before", "reward", "after", "reward", box=SIMPLE_HEAD, pad_edge=False)
        for turn in summary.turns:
            cells = (turn.prompt, turn.before, _reward(turn.reward_before), turn.after, _reward(turn.reward_after))
            table.add_row(*(Text(_one_line(cell, 200), overflow="fold") for cell in cells))
        console.print(table)
    if summary.commands:
        steps = Table.grid(padding=(0, 2))
        for command, purpose in summary.commands:
            steps.add_row(Text(f"  {command}", style="bold"), Text(purpose, style="dim"))
        console.print(Text("next", style="dim"))
        console.print(steps)


def _scored(text: str, reward: float | None) -> str:
    return _one_line(text) + (f"   [{figure(reward)}]" if reward is not None else "")


def _reward(reward: float | None) -> str:
    return "" if reward is None else figure(reward)


def _one_line(text: str, most: int = 100) -> str:
    """Text with its line ends and control characters spelt out, cut to ``most`` characters.

    >>> _one_line("a\\nb" + 200 * "c", 8)
    'a\\\\nbcccc...'
    """
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return plain if len(plain) <= most else plain[:most] + "..."
