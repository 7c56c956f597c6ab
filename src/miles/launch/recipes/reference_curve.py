"""Reference curves of recipes: metrics of real runs with a tolerance band, and whether another run is within it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.observe.log_reader import read_rows

_MARGIN = 2.0
_LEAST_OF_RANGE = 0.1
_LEAST_OF_VALUE = 0.02
"""Half the width of a band: this many times the largest deviation of its runs in a window and its two neighbours, and
at least these parts of the metric's range and of its largest value. Few runs show less than the whole spread.
"""
_OUTSIDE = 0.1
"""Part of the windows that may be outside the band; chance alone moves some there."""
KINDS = ("train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A metric over windows of steps: the last step of each, and mean, lowest and highest value there."""

    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCurve:
    """Bands by metric, the size of their windows in steps, and which runs they are from."""

    recipe: str
    runs: int
    window: int
    made_with: str
    metrics: dict[str, Band]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricVerdict:
    """How a run's metric lies in its band; ``outside`` has the first window outside: step, value, low and high."""

    name: str
    windows: int
    num_outside: int
    last: float
    band: tuple[float, float]
    outside: tuple[int, float, float, float] | None

    @property
    def on_curve(self) -> bool:
        """Whether no more windows are outside than chance puts there."""
        return self.num_outside <= _OUTSIDE * self.windows


def build_curve(
    runs: Sequence[Path], names: Sequence[str], *, recipe: str, window: int, made_with: str
) -> ReferenceCurve:
    """The curve of several runs of one recipe, which differ by their seeds; UsageError where they do not agree."""
    if len(runs) < 2:
        raise UsageError("A reference curve needs at least two runs, with different seeds; name more of them.")
    metrics: dict[str, Band] = {}
    for name in names:
        means = [read_windows(run, name, window) for run in runs]
        steps = sorted(set.intersection(*(set(each) for each in means)))
        if not steps:
            raise UsageError(
                f"{name} is not a metric of every one of these runs, or they have less than {window} steps."
            )
        metrics[name] = _build_band(steps, [[each[step] for step in steps] for each in means])
    return ReferenceCurve(recipe=recipe, runs=len(runs), window=window, made_with=made_with, metrics=metrics)


def _build_band(steps: Sequence[int], curves: Sequence[Sequence[float]]) -> Band:
    windows = list(zip(*curves, strict=True))
    mean = [fmean(values) for values in windows]
    deviations = [max(abs(value - center) for value in values) for values, center in zip(windows, mean, strict=True)]
    every = [value for values in windows for value in values]
    least = max(_LEAST_OF_RANGE * (max(every) - min(every)), _LEAST_OF_VALUE * max(map(abs, every)), 1e-6)
    half = [max(_MARGIN * max(deviations[max(0, i - 1) : i + 2]), least) for i in range(len(mean))]
    return Band(
        steps=tuple(steps),
        mean=tuple(round(value, 6) for value in mean),
        low=tuple(round(value - width, 6) for value, width in zip(mean, half, strict=True)),
        high=tuple(round(value + width, 6) for value, width in zip(mean, half, strict=True)),
    )


def read_windows(run: Path, name: str, window: int) -> dict[int, float]:
    """The mean of a metric over each full window of ``window`` steps, by its last step; none where it is not logged."""
    rows = read_rows(run / "metrics.jsonl")
    for kind in KINDS:
        steps, values = rows.series(kind, name)
        if steps:
            break
    else:
        return {}
    found: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        if step > 0 and isfinite(value):
            found.setdefault(-(-step // window) * window, []).append(value)
    last = max(rows.select("train")[-1].step if rows.select("train") else 0, steps[-1])
    return {end: fmean(values) for end, values in sorted(found.items()) if end <= last}


def compare_run(run: Path, curve: ReferenceCurve) -> list[MetricVerdict]:
    """The verdict on each metric as far as the run has come; UsageError where it has none of their windows."""
    verdicts: list[MetricVerdict] = []
    for name, band in curve.metrics.items():
        own = read_windows(run, name, curve.window)
        shared = [i for i, step in enumerate(band.steps) if step in own]
        if not shared:
            continue
        out = [i for i in shared if not band.low[i] <= own[band.steps[i]] <= band.high[i]]
        last, first = shared[-1], out[0] if out else None
        verdicts.append(
            MetricVerdict(
                name=name,
                windows=len(shared),
                num_outside=len(out),
                last=own[band.steps[last]],
                band=(band.low[last], band.high[last]),
                outside=None
                if first is None
                else (band.steps[first], own[band.steps[first]], band.low[first], band.high[first]),
            )
        )
    if not verdicts:
        raise UsageError(
            f"{run} has none of the curve's metrics over {curve.window} steps ({', '.join(curve.metrics)}); "
            "let it run longer, or name another reference."
        )
    return verdicts


def write_curve(curve: ReferenceCurve, file: Path) -> None:
    """Write a curve as JSON."""
    file.write_text(json.dumps(asdict(curve), indent=1) + "\n", encoding="utf-8")


def read_curve(file: Path) -> ReferenceCurve:
    """Read a curve; DataError where the file is none."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        bands = {
            name: Band(**{key: tuple(values) for key, values in band.items()})
            for name, band in found.pop("metrics").items()
        }
        curve = ReferenceCurve(**found, metrics=bands)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not a reference curve, as miles compare --write-reference writes it") from error
    if any(len({len(b.steps), len(b.mean), len(b.low), len(b.high)}) != 1 for b in curve.metrics.values()):
        raise DataError(f"{file} has a band whose columns differ in length")
    return curve
