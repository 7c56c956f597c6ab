"""Health checks of a run: is it learning, and if not, why; each with its threshold, the cure and its page.

A check looks at the mean over the newest ``_WINDOW`` steps, so one bad step does not turn it red.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from miles.observe.dashboard.metric_store import FloatArray
from miles.observe.dashboard.run_index import clean
from miles.observe.dashboard.run_reader import RunReader
from miles.observe.formatting import classify_parity, format_fixed, format_number

Level = Literal["ok", "warn", "bad", "none"]
_WINDOW = 20
_MIN_STEPS = 10
_SIGNIFICANT = 2.0
"""Standard errors beyond which a change of the reward counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One check: ``value`` was found, ``threshold`` is when it warns, ``cure`` what to do, ``page`` where to read."""

    name: str
    level: Level
    value: str
    threshold: str
    cure: str
    page: str
    metric: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShareRule:
    """A check of a fraction that should be small."""

    name: str
    metric: str
    warn: float
    bad: float
    cure: str
    page: str


_SOLVED = "Nearly every response has the best reward, so little is left to learn: use harder prompts, or stop."
_SHARES = (
    _ShareRule(
        name="groups with equal rewards",
        metric="zero_std_ratio",
        warn=0.5,
        bad=0.9,
        cure="Advantages of such groups are 0. Sample more per prompt (--n-samples-per-prompt), choose prompts of "
        "medium difficulty, or drop these groups with a filter (--dynamic-sampling-filter-path).",
        page="what_to_watch.md#over-the-run",
    ),
    _ShareRule(
        name="truncated responses",
        metric="truncated_ratio",
        warn=0.1,
        bad=0.5,
        cure="Responses end at the length limit before they answer: raise --rollout-max-response-len, or add an "
        "overlong penalty.",
        page="what_to_watch.md#over-the-run",
    ),
    _ShareRule(
        name="trajectories without a reward",
        metric="unscored_ratio",
        warn=0.01,
        bad=0.2,
        cure="The reward function raised or took too long: read the reason of one in the view Reading.",
        page="rewards.md",
    ),
    _ShareRule(
        name="failed environments",
        metric="failed_ratio",
        warn=0.01,
        bad=0.2,
        cure="The environment or the agent failed: read the reason of one in the view Reading.",
        page="tools.md",
    ),
    _ShareRule(
        name="clipped tokens",
        metric="pg_clipfrac",
        warn=0.2,
        bad=0.5,
        cure="The policy moves far within a step: lower --lr, or take fewer optimizer steps per rollout.",
        page="algorithms.md",
    ),
)


def assess_run(run: RunReader, parity_tolerance: float) -> dict[str, Any]:
    """Return the verdict of a run and its checks."""
    checks = list(_list_checks(run, parity_tolerance))
    verdict, reason = judge_learning(run)
    return {"verdict": verdict, "reason": reason, "checks": [asdict(check) for check in checks]}


def judge_learning(run: RunReader) -> tuple[str, str]:
    """Return the verdict in a word or two, and the numbers it rests on."""
    name = "reward" if "reward" in run.metrics.names("train") else "loss"
    values_T = run.metrics.series("train", name)[1]
    values_T = values_T[np.isfinite(values_T)]
    if len(values_T) < _MIN_STEPS:
        return "too early", f"{len(values_T)} steps so far; a verdict needs {_MIN_STEPS}."
    gain, error = measure_gain(values_T)
    if name == "loss":
        gain = -gain
    change, change_error = measure_trend(values_T)
    change = -change if name == "loss" else change
    ends = f"{name} {format_fixed(_first(values_T))} at the start, {format_fixed(_last(values_T))} now"
    trend = f"over the newest {_trend_window(len(values_T))} steps {_format_change(change, change_error)}"
    reason = f"{ends} ({_format_change(gain, error)}); {trend}."
    if gain > _SIGNIFICANT * error and change < -_SIGNIFICANT * change_error:
        return "falling again", reason
    if gain > _SIGNIFICANT * error:
        return ("learning" if change > _SIGNIFICANT * change_error else "learned, now flat"), reason
    if gain < -_SIGNIFICANT * error:
        return "getting worse", reason
    return "not learning", reason


def measure_gain(values: FloatArray) -> tuple[float, float]:
    """Return the mean of the last tenth minus that of the first, and the standard error of the difference."""
    count = max(5, len(values) // 10)
    first, last = values[:count], values[-count:]
    error = math.sqrt(first.var(ddof=1) / count + last.var(ddof=1) / count)
    return float(last.mean() - first.mean()), error


def measure_trend(values: FloatArray) -> tuple[float, float]:
    """Return the change over the newest steps by a least-squares line, and its standard error.

    >>> change, error = measure_trend(np.arange(20) / 19)
    >>> round(change, 6), round(error, 6)
    (1.0, 0.0)
    """
    recent = values[-_trend_window(len(values)) :]
    x = np.linspace(0.0, 1.0, len(recent))
    centred = x - x.mean()
    slope = float((centred * recent).sum() / (centred**2).sum())
    residual = recent - recent.mean() - slope * centred
    variance = float((residual**2).sum()) / max(1, len(recent) - 2)
    return slope, math.sqrt(variance / float((centred**2).sum()))


def _trend_window(count: int) -> int:
    return min(count, max(_WINDOW, count // 4))


def _first(values: FloatArray) -> float:
    return float(values[: max(5, len(values) // 10)].mean())


def _last(values: FloatArray) -> float:
    return float(values[-max(5, len(values) // 10) :].mean())


def _format_change(value: float, error: float) -> str:
    return f"{value:+.3f} ± {error:.3f}"


# -- checks ---------------------------------------------------------------------------------


def _list_checks(run: RunReader, parity_tolerance: float) -> Iterator[HealthCheck]:
    config = run.flat_config()
    builders: tuple[Callable[[], HealthCheck | None], ...] = (
        lambda: _check_finite(run),
        *(lambda rule=rule: _check_share(run, rule) for rule in _SHARES),
        lambda: _check_entropy(run),
        lambda: _check_kl(run),
        lambda: _check_parity(run, parity_tolerance),
        lambda: _check_staleness(run, config),
        lambda: _check_stalls(run),
        lambda: _check_sessions(run),
        lambda: _check_lines(run),
    )
    yield from (check for build in builders if (check := build()) is not None)


def _recent(run: RunReader, name: str) -> FloatArray:
    return run.metrics.series("train", name)[1][-_WINDOW:]


def _check_share(run: RunReader, rule: _ShareRule) -> HealthCheck | None:
    recent = _recent(run, rule.metric)
    recent = recent[np.isfinite(recent)]
    if not len(recent):
        return None
    share = float(recent.mean())
    is_solved = rule.metric == "zero_std_ratio" and _is_solved(run)
    level: Level = "bad" if share > rule.bad and not is_solved else "warn" if share > rule.warn else "ok"
    return HealthCheck(
        name=rule.name,
        level=level,
        value=f"{share:.1%}",
        threshold=f"warns above {rule.warn:.0%}, red above {rule.bad:.0%}",
        cure=_SOLVED if is_solved else rule.cure,
        page=rule.page,
        metric=rule.metric,
    )


def _is_solved(run: RunReader) -> bool:
    """Return whether nearly every response has the largest reward that was ever given."""
    rewards_T, largest_T = (run.metrics.series("train", name)[1] for name in ("reward", "reward_max"))
    smallest_T = run.metrics.series("train", "reward_min")[1]
    if not len(rewards_T) or not len(largest_T) or not len(smallest_T):
        return False
    best, worst = float(np.nanmax(largest_T)), float(np.nanmin(smallest_T))
    return best > worst and best - float(rewards_T[-_WINDOW:].mean()) < 0.05 * (best - worst)


def _check_finite(run: RunReader) -> HealthCheck | None:
    name = next((name for name in ("grad_norm", "loss") if name in run.metrics.names("train")), None)
    if name is None:
        return None
    steps_T, values_T = run.metrics.series("train", name)
    broken = steps_T[~np.isfinite(values_T)]
    return HealthCheck(
        name="finite gradients",
        level="bad" if len(broken) else "ok",
        value=f"{len(broken)} steps with NaN, first {broken[0]}" if len(broken) else format_number(values_T[-1]),
        threshold=f"red when {name} is not finite",
        cure="Look at the rollouts of that step, and lower --lr if the loss was growing.",
        page="what_to_watch.md#over-the-run",
        metric=name,
    )


def _check_entropy(run: RunReader) -> HealthCheck | None:
    values_T = run.metrics.series("train", "entropy")[1]
    values_T = values_T[np.isfinite(values_T)]
    if len(values_T) < _MIN_STEPS:
        return None
    start, now = float(values_T[:5].mean()), float(values_T[-_WINDOW:].mean())
    left = now / start if start > 0 else math.inf
    is_rising = left > 3
    return HealthCheck(
        name="entropy",
        level="bad" if left < 0.01 else "warn" if left < 0.1 or is_rising else "ok",
        value=f"{format_number(now)} nats, {left:.0%} of the start",
        threshold="warns below 10% or above 300% of the start, red below 1%",
        cure="The policy forgets how to explore: lower --lr, raise --eps-clip-high, or add a little --entropy-coef."
        if not is_rising
        else "The policy becomes random: lower --lr, or --entropy-coef if it is set.",
        page="what_to_watch.md#over-the-run",
        metric="entropy",
    )


def _check_kl(run: RunReader) -> HealthCheck | None:
    name = next((name for name in ("kl", "ppo_kl") if name in run.metrics.names("train")), None)
    recent = _recent(run, name) if name is not None else np.zeros(0)
    recent = np.abs(recent[np.isfinite(recent)])
    if not len(recent):
        return None
    value, (warn, bad) = float(recent.mean()), (1.0, 10.0) if name == "kl" else (0.05, 0.5)
    return HealthCheck(
        name="KL from the reference" if name == "kl" else "KL of an update",
        level="bad" if value > bad else "warn" if value > warn else "ok",
        value=f"{format_number(value)} nats",
        threshold=f"warns above {format_number(warn)}, red above {format_number(bad)}",
        cure="The policy moves far: lower --lr, or raise --kl-loss-coef with --use-kl-loss.",
        page="algorithms.md",
        metric=name,
    )


def _check_parity(run: RunReader, tolerance: float) -> HealthCheck | None:
    recent = _recent(run, "parity_mean_abs")
    if not len(recent):
        return None
    worst = float(recent.max()) if np.isfinite(recent).all() else math.nan
    levels: Mapping[str, Level] = {"ok": "ok", "warn": "warn", "red": "bad"}
    return HealthCheck(
        name="parity of engine and trainer",
        level=levels[classify_parity(worst, tolerance)],
        value=f"{format_number(worst, 2)} mean |Δ log-prob|",
        threshold=f"warns above {format_number(tolerance / 10)}, red above {format_number(tolerance)}",
        cure="Engine and trainer compute different log-probs: miles parity finds the first operation that differs; "
        "--use-tis corrects for the rest.",
        page="parity.md",
        metric="parity_mean_abs",
    )


def _check_staleness(run: RunReader, config: Mapping[str, Any]) -> HealthCheck | None:
    recent = _recent(run, "staleness")
    bound = config.get("max_weight_staleness", 0)
    if not len(recent) or not isinstance(bound, int):
        return None
    worst = clean(float(recent.max()))
    is_over = worst is None or worst > bound
    return HealthCheck(
        name="staleness",
        level="bad" if is_over else "warn" if worst is not None and worst > 4 else "ok",
        value="?" if worst is None else f"{format_number(worst)} versions, bound {bound}",
        threshold="warns above 4 versions, red above --max-weight-staleness",
        cure="Samples are of old weights: lower --max-weight-staleness, or correct for it with --use-tis.",
        page="async_training.md",
        metric="staleness",
    )


def _check_stalls(run: RunReader) -> HealthCheck:
    files = run.stall_files()
    return HealthCheck(
        name="stalls",
        level="warn" if files else "ok",
        value=f"{len(files)} stack dump{'' if len(files) == 1 else 's'}" if files else "none",
        threshold="warns at the first one",
        cure="Nothing moved for a share of --stall-timeout: the stacks in the view Cluster show where processes were.",
        page="fault_tolerance.md",
    )


def _check_sessions(run: RunReader) -> HealthCheck:
    names = [record.get("event") for record in run.sessions]
    starts, left, failed = (names.count(name) for name in ("RunStarted", "EngineLeft", "SaveFailed"))
    parts = [f"{max(0, starts - 1)} restarts", f"{left} engines left", f"{failed} failed saves"]
    return HealthCheck(
        name="restarts",
        level="bad" if failed else "warn" if starts > 1 or left else "ok",
        value=", ".join(part for part in parts if not part.startswith("0 ")) or "none",
        threshold="warns at the first restart, red when a checkpoint could not be saved",
        cure="The view Cluster lists when each process started and ended.",
        page="fault_tolerance.md",
    )


def _check_lines(run: RunReader) -> HealthCheck | None:
    count = run.metrics.unreadable + run.timings.unreadable
    if not count:
        return None
    return HealthCheck(
        name="unreadable lines",
        level="warn",
        value=f"{count} lines of metrics.jsonl or timings.jsonl",
        threshold="warns at the first one",
        cure="Something else wrote into these files; the lines are left out here.",
        page="run_directory.md",
    )
