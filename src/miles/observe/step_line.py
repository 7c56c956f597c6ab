"""Step line: the cells of the one-line summary of a step, and which are dropped on a narrow terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles.core.events import (
    BatchTaken,
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
from miles.observe.formatting import (
    ASCII_BLOCKS,
    BLOCKS,
    ParityStatus,
    classify_parity,
    format_count,
    format_fixed,
    format_number,
    sparkline,
)

GAP = "  "
ESSENTIAL_RANK = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a line: label, value, optionally the parity status; cells of higher ``rank`` are dropped first."""

    label: str
    value: str
    rank: int
    status: ParityStatus | None = None

    def text(self) -> str:
        return " ".join(part for part in (self.label, self.status, self.value) if part)


def fit(wide: Sequence[Cell], brief: Sequence[Cell], width: int) -> list[Cell]:
    """Return the wide cells if the essential ones fit ``width`` columns, else as many of the brief ones as fit."""
    cells = _drop(wide, width, keep=ESSENTIAL_RANK)
    return cells if _length(cells) <= width else _drop(brief, width, keep=0)


def _drop(cells: Sequence[Cell], width: int, *, keep: int) -> list[Cell]:
    """Drop the least important cells, down to rank ``keep``, until the rest fits."""
    kept = list(cells)
    while _length(kept) > width and (last := max(kept, key=lambda cell: cell.rank)).rank > keep:
        kept.remove(last)
    return kept


def _length(cells: Sequence[Cell]) -> int:
    return len(GAP.join(cell.text() for cell in cells))


class RunProgress:
    """Progress of a run as needed for its lines: step, reward history, step time."""

    def __init__(self, *, parity_tolerance: float = 0.01, unicode: bool = True) -> None:
        self.step = 0
        self.steps = 0
        self._tolerance = parity_tolerance
        self._blocks = BLOCKS if unicode else ASCII_BLOCKS
        self._rewards: deque[float] = deque(maxlen=64)
        self._evals: dict[str, list[float]] = {}
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._group_size = 0
        # Whether all groups of the last step had equal rewards, and whether its gradient was 0 for another reason.
        self._no_learning = (False, False)

    def update(self, event: Event) -> None:
        """Record an event; call it before asking for the event's line."""
        match event:
            case RunStarted():
                self.step, self.steps = event.step, event.steps
            case StepFinished():
                self.step = event.step
                if "reward" in event.metrics:
                    self._rewards.append(event.metrics["reward"])
                if (seconds := step_seconds(event.seconds)) is not None:
                    self._step_seconds.append(seconds)
            case BatchTaken():
                self._group_size = max((len(group.trajectories) for group in event.groups), default=0)
            case Evaluated():
                for name, value in eval_rewards(event.metrics).items():
                    self._evals.setdefault(name, []).append(value)
            case _:
                pass

    def eta(self) -> float | None:
        """Estimate the seconds to the end from the recent step times."""
        steps_left = self.steps - self.step
        if not self._step_seconds or steps_left <= 0:
            return None
        return steps_left * sum(self._step_seconds) / len(self._step_seconds)

    def step_cells(self, event: StepFinished, *, brief: bool = False) -> list[Cell]:
        """Return the line of a finished step; missing metrics have no cell."""
        metrics = event.metrics
        cells = [Cell(label="" if brief else "step", value=self._format_step(event.step), rank=0)]
        if "reward" in metrics:
            spark = self._spark(list(self._rewards), 8 if brief else 12)
            cells.append(Cell(label="reward", value=format_fixed(metrics["reward"]), rank=1))
            cells.append(Cell(label="", value=spark, rank=3))
        if metrics.get("unscored_ratio"):
            cells.append(Cell(label="unscored", value=f"{metrics['unscored_ratio']:.0%}", rank=2))
        cells += _rollout_cells(metrics)
        cells += _throughput_cells(event, brief)
        if "speculative/accept_length" in event.seconds:
            length = event.seconds["speculative/accept_length"]
            cells.append(Cell(label="acc" if brief else "accept len", value=f"{length:.2f}", rank=7))
        if "staleness" in metrics:
            label = "stale" if brief else "staleness"
            cells.append(Cell(label=label, value=format_number(metrics["staleness"]), rank=6))
        if "parity_mean_abs" in metrics:
            gap = metrics["parity_mean_abs"]
            status = classify_parity(gap, self._tolerance)
            cells.append(Cell(label="" if brief else "parity", value=format_number(gap, 2), rank=2, status=status))
        for name, rank in (("loss", 9), ("kl", 8), ("entropy", 7), ("lr", 10)):
            if name in metrics and (name != "loss" or "reward" not in metrics):
                cells.append(Cell(label=name, value=format_number(metrics[name]), rank=rank))
        if "grad_norm" in metrics:
            cells.append(Cell(label="grad", value=format_number(metrics["grad_norm"]), rank=9))
        if seconds := step_seconds(event.seconds):
            cells.append(Cell(label="took", value=f"{format_number(seconds)} s", rank=8))
        return cells

    def explain_no_learning(self, event: StepFinished) -> str | None:
        """Why nothing can be learned from a step, at the first such step of a sequence of them."""
        metrics = event.metrics
        is_flat = self._group_size > 1 and metrics.get("zero_std_ratio") == 1.0
        has_no_grad = not is_flat and metrics.get("zero_std_ratio", 1.0) < 1.0 and metrics.get("grad_norm") == 0.0
        before, self._no_learning = self._no_learning, (is_flat, has_no_grad)
        if self._no_learning == before:
            return None
        if has_no_grad:
            return (
                f"The gradient of step {event.step} is exactly 0 though rewards differ within groups: nothing was "
                "learned. Unless a correction or a filter removed all tokens, this is a defect of the trainer; compare "
                "with another --train-backend, and report it with the archive of miles bundle."
            )
        return _explain_equal_rewards(metrics) if is_flat else None

    def eval_cells(self, event: Evaluated) -> list[Cell]:
        """Return the line of an evaluation: every held-out set's reward and its history."""
        cells = [Cell(label="eval", value=self._format_step(event.step), rank=0)]
        for number, (name, value) in enumerate(eval_rewards(event.metrics).items()):
            cells.append(Cell(label=name, value=format_fixed(value), rank=2 * number + 1))
            cells.append(Cell(label="", value=sparkline(self._evals[name], blocks=self._blocks), rank=2 * number + 2))
        return cells

    def message(self, event: Event) -> str | None:
        """Return the message of any other event; None if it has none."""
        match event:
            case RunStarted() if event.step:
                return f"resuming after step {event.step} of {event.steps}"
            case Saved():
                return f"saved checkpoint {event.name}"
            case SaveFailed():
                return event.reason
            case EngineJoined():
                return f"{event.name} at {event.address} joined with version {event.version.number}"
            case EngineLeft():
                return f"{event.name} at {event.address} left"
            case DevicesMoved():
                return f"devices moved: {event.ranks} ranks, {event.engines} engines: {event.reason}"
            case RunEnded() if not event.finished:
                return f"stopped after step {event.step} of {self.steps}"
            case _:
                return None

    def _format_step(self, step: int) -> str:
        total = str(self.steps)
        return f"{step:>{len(total)}}/{total}" if self.steps else str(step)

    def _spark(self, values: Sequence[float], width: int = 12) -> str:
        return sparkline(values, width, blocks=self._blocks).ljust(min(width, self.steps))


def _rollout_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Return what explains a reward: groups with equal rewards, response length, truncated responses."""
    cells = []
    if "zero_std_ratio" in metrics:
        cells.append(Cell(label="equal", value=f"{metrics['zero_std_ratio']:.0%}", rank=7))
    if "response_length" in metrics:
        cells.append(Cell(label="length", value=format_count(metrics["response_length"]), rank=7))
    if "truncated_ratio" in metrics:
        cells.append(Cell(label="truncated", value=f"{metrics['truncated_ratio']:.0%}", rank=8))
    return cells


def _explain_equal_rewards(metrics: Mapping[str, float]) -> str:
    truncated, low, high = (metrics.get(name, 0.0) for name in ("truncated_ratio", "reward_min", "reward_max"))
    if metrics.get("unscored_ratio", 0.0) == 1.0:
        why = "no trajectory could be scored; look at one with miles show"
    elif truncated > 0.5 and low == high:
        why = f"{truncated:.0%} of the responses were truncated at --rollout-max-response-len; raise it"
    elif low == high == 0.0:
        why = (
            "all of them are 0; look at a response with miles show, and check that the prompt asks for the form that "
            "the reward expects (--prompt-template)"
        )
    elif low == high:
        why = f"all of them are {format_number(high)}; the prompts may be too easy for this reward"
    else:
        why = "each prompt succeeds always or never; sample more with --n-samples-per-prompt, or choose other prompts"
    return f"All groups have equal rewards, so advantages relative to the group are 0: {why}."


def _throughput_cells(event: StepFinished, brief: bool) -> list[Cell]:
    """Return the tokens per second of each plane."""
    metrics = event.metrics
    tokens = {"rollout": metrics.get("rollout_tokens"), "train": metrics.get("train_tokens", metrics.get("tokens"))}
    cells = []
    for rank, (plane, amount) in enumerate(tokens.items(), 4):
        seconds = event.seconds.get(plane, 0.0)
        if amount is not None and seconds > 0:
            rate = f"{format_count(amount / seconds):>5}" + ("/s" if brief else " tok/s")
            cells.append(Cell(label="roll" if brief and plane == "rollout" else plane, value=rate, rank=rank))
    return cells


def step_seconds(seconds: Mapping[str, float]) -> float | None:
    """Return the time of the whole step, as recorded or as the sum of its phases."""
    if "step" in seconds:
        return seconds["step"]
    phases = [seconds[name] for name in ("rollout", "offload", "train", "publish") if name in seconds]
    return sum(phases) if phases else None


def eval_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each held-out set's reward by the set's name.

    >>> eval_rewards({"eval/easy/reward": 0.5, "eval/easy/truncated": 0.0, "reward": 0.25})
    {'easy': 0.5, 'reward': 0.25}
    """
    rewards = {}
    for name, value in metrics.items():
        head, _, last = name.rpartition("/")
        if last == "reward":
            rewards[head.removeprefix("eval/") or "reward"] = value
    return rewards
