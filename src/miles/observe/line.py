"""One line a step: the cells both terminal views print, and which give way when the terminal is narrow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles.core.events import (
    DevicesMoved,
    EngineJoined,
    EngineLeft,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    Saved,
    SaveFailed,
    StepFinished,
)
from miles.observe.text import ASCII_BLOCKS, BLOCKS, Light, count, figure, fixed, parity_light, sparkline

GAP = "  "
ESSENTIAL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A piece of a line: a dim label, a value, the parity light if it is one; the lowest ``rank`` gives way last."""

    label: str
    value: str
    rank: int
    light: Light | None = None

    def text(self) -> str:
        return " ".join(part for part in (self.label, self.light, self.value) if part)


def fit(wide: Sequence[Cell], brief: Sequence[Cell], width: int) -> list[Cell]:
    """The wide cells if all that matters of them fits ``width`` columns, else as many of the brief ones as do."""
    kept = _drop(wide, width, keep=ESSENTIAL)
    return kept if _length(kept) <= width else _drop(brief, width, keep=0)


def _drop(cells: Sequence[Cell], width: int, *, keep: int) -> list[Cell]:
    """Leave out the least important cells, down to those of rank ``keep``, until the rest fits."""
    kept = list(cells)
    while _length(kept) > width and (last := max(kept, key=lambda cell: cell.rank)).rank > keep:
        kept.remove(last)
    return kept


def _length(cells: Sequence[Cell]) -> int:
    return len(GAP.join(cell.text() for cell in cells))


class Story:
    """Remembers as much of a run as a line needs: how far it is, how the reward went, how long a step takes."""

    def __init__(self, *, parity_tolerance: float = 0.01, unicode: bool = True) -> None:
        self.step, self.steps = 0, 0
        self._tolerance = parity_tolerance
        self._blocks = BLOCKS if unicode else ASCII_BLOCKS
        self._rewards: deque[float] = deque(maxlen=64)
        self._evals: dict[str, list[float]] = {}
        self._step_seconds: deque[float] = deque(maxlen=20)

    def see(self, event: Event) -> None:
        """Take an event in; call it before asking for the event's line."""
        match event:
            case RunStarted():
                self.step, self.steps = event.step, event.steps
            case StepFinished():
                self.step = event.step
                if "reward" in event.metrics:
                    self._rewards.append(event.metrics["reward"])
                if (spent := step_seconds(event.seconds)) is not None:
                    self._step_seconds.append(spent)
            case Evaluated():
                for name, value in eval_rewards(event.metrics).items():
                    self._evals.setdefault(name, []).append(value)
            case _:
                pass

    def eta(self) -> float | None:
        """Seconds to the end, if the steps to come take as long as the last ones."""
        left = self.steps - self.step
        if not self._step_seconds or left <= 0:
            return None
        return left * sum(self._step_seconds) / len(self._step_seconds)

    def step_cells(self, event: StepFinished, *, brief: bool = False) -> list[Cell]:
        """The line of a finished step; a metric that is not there has no cell."""
        seen = event.metrics
        cells = [Cell(label="" if brief else "step", value=self._place(event.step), rank=0)]
        if "reward" in seen:
            spark = self._spark(list(self._rewards), 8 if brief else 12)
            cells.append(Cell(label="reward", value=fixed(seen["reward"]), rank=1))
            cells.append(Cell(label="", value=spark, rank=3))
        cells += _rates(event, brief)
        if "staleness" in seen:
            cells.append(Cell(label="stale", value=figure(seen["staleness"]), rank=6))
        if "parity_mean_abs" in seen:
            gap = seen["parity_mean_abs"]
            light = parity_light(gap, self._tolerance)
            cells.append(Cell(label="" if brief else "parity", value=figure(gap, 2), rank=2, light=light))
        for name, rank in (("loss", 9), ("kl", 8), ("entropy", 7), ("lr", 10)):
            if name in seen and (name != "loss" or "reward" not in seen):
                cells.append(Cell(label=name, value=figure(seen[name]), rank=rank))
        return cells

    def eval_cells(self, event: Evaluated) -> list[Cell]:
        """The line of an evaluation: every held-out set's reward, and how it went."""
        cells = [Cell(label="eval", value=self._place(event.step), rank=0)]
        for number, (name, value) in enumerate(eval_rewards(event.metrics).items()):
            cells.append(Cell(label=name, value=fixed(value), rank=2 * number + 1))
            cells.append(Cell(label="", value=sparkline(self._evals[name], blocks=self._blocks), rank=2 * number + 2))
        return cells

    def sentence(self, event: Event) -> str | None:
        """What else is worth a line of its own."""
        match event:
            case RunStarted() if event.step:
                return f"continuing after step {event.step} of {event.steps}"
            case Saved():
                return f"saved checkpoint {event.name}"
            case SaveFailed():
                return event.why
            case EngineJoined():
                return f"{event.name} at {event.address} has joined, with version {event.version.number}"
            case EngineLeft():
                return f"{event.name} at {event.address} has left"
            case DevicesMoved():
                return f"ranks {event.ranks}, engines {event.engines} from now on: {event.why}"
            case RunEnded() if not event.finished:
                return f"stopped after step {event.step} of {self.steps}"
            case _:
                return None

    def _place(self, step: int) -> str:
        total = str(self.steps)
        return f"{step:>{len(total)}}/{total}" if self.steps else str(step)

    def _spark(self, values: Sequence[float], width: int = 12) -> str:
        return sparkline(values, width, blocks=self._blocks).ljust(min(width, self.steps))


def _rates(event: StepFinished, brief: bool) -> list[Cell]:
    """Tokens a second of each plane, over the time the loop spent on it."""
    seen = event.metrics
    tokens = {"rollout": seen.get("rollout_tokens"), "train": seen.get("train_tokens", seen.get("tokens"))}
    cells = []
    for rank, (plane, amount) in enumerate(tokens.items(), 4):
        spent = event.seconds.get(plane, 0.0)
        if amount is not None and spent > 0:
            rate = f"{count(amount / spent):>5}" + ("/s" if brief else " tok/s")
            cells.append(Cell(label="roll" if brief and plane == "rollout" else plane, value=rate, rank=rank))
    return cells


def step_seconds(seconds: Mapping[str, float]) -> float | None:
    """How long the whole step took, as told or as the sum of its phases."""
    if "step" in seconds:
        return seconds["step"]
    phases = [seconds[name] for name in ("rollout", "train", "publish") if name in seconds]
    return sum(phases) if phases else None


def eval_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Each held-out set's reward by the set's name.

    >>> eval_rewards({"eval/easy/reward": 0.5, "eval/easy/truncated": 0.0, "reward": 0.25})
    {'easy': 0.5, 'reward': 0.25}
    """
    named = {}
    for name, value in metrics.items():
        head, _, last = name.rpartition("/")
        if last == "reward":
            named[head.removeprefix("eval/") or "reward"] = value
    return named
