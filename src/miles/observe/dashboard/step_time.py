"""Time of a step by phase, its share of the run, and the option that would shorten the largest share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miles.observe.dashboard.metric_store import select_points, to_json_numbers
from miles.observe.dashboard.run_reader import RunReader

PHASES = ("rollout", "train", "publish")
_RATES = ("per_token", "ratio", "bytes")
_CHART_POINTS = 400


def split_step_time(run: RunReader, *, newest: int = 50) -> dict[str, Any]:
    """Return the mean seconds of each phase and part over the ``newest`` steps, evaluations per step, and advice."""
    steps_T, total_T = run.timings.series("train", "step")
    if not len(steps_T):
        return {"steps": 0, "phases": [], "advice": [], "chart": None}
    first = int(steps_T[-newest:][0])
    mean = float(total_T[-newest:].mean())
    phases = [_build_phase(run, phase, first) for phase in PHASES]
    known = sum(phase["seconds"] for phase in phases)
    phases.append({"name": "other", "seconds": max(0.0, mean - known), "parts": []})
    evaluation = _mean_evaluation(run, first, len(steps_T[-newest:]))
    if evaluation:
        phases.append({"name": "evaluate", "seconds": evaluation, "parts": []})
    whole = mean + evaluation
    for phase in phases:
        phase["share"] = phase["seconds"] / whole if whole else 0.0
    return {
        "steps": len(steps_T[-newest:]),
        "first_step": first,
        "last_step": int(steps_T[-1]),
        "seconds_per_step": whole,
        "phases": phases,
        "rates": _measure_rates(run, first),
        "advice": list_advice({phase["name"]: phase["share"] for phase in phases}, run),
        "chart": _build_chart(run),
    }


def _build_phase(run: RunReader, phase: str, first: int) -> dict[str, Any]:
    parts = [
        {"name": name, "seconds": _mean_since(run, name, first)}
        for name in run.timings.names("train")
        if name.startswith(f"{phase}/") and not name.endswith(_RATES)
    ]
    parts.sort(key=lambda part: -part["seconds"])
    return {"name": phase, "seconds": _mean_since(run, phase, first), "parts": parts}


def _mean_since(run: RunReader, name: str, first: int) -> float:
    steps_T, values_T = run.timings.series("train", name)
    kept = values_T[steps_T >= first]
    return float(kept.mean()) if len(kept) else 0.0


def _mean_evaluation(run: RunReader, first: int, count: int) -> float:
    """Return the seconds of evaluations since ``first``, per step."""
    steps_T, values_T = run.timings.series("eval", "evaluate")
    return float(values_T[steps_T >= first].sum()) / count


def _measure_rates(run: RunReader, first: int) -> dict[str, float]:
    """Return tokens per second of each plane, and seconds per thousand tokens of a whole step."""
    rates: dict[str, float] = {}
    for plane, names in (("rollout", ("rollout_tokens",)), ("train", ("train_tokens", "tokens"))):
        name = next((name for name in names if name in run.metrics.names("train")), None)
        seconds = _mean_since(run, plane, first)
        if name is not None and seconds > 0:
            steps_T, tokens_T = run.metrics.series("train", name)
            rates[plane] = float(tokens_T[steps_T >= first].mean()) / seconds
    ratios_T = run.timings.series("train", "train/straggler_ratio")[1]
    if len(ratios_T):
        rates["straggler_ratio"] = float(np.median(ratios_T[-50:]))
    return rates


def _build_chart(run: RunReader) -> dict[str, Any]:
    """Return the seconds of each phase at steps spread over the whole run."""
    steps_T, total_T = run.timings.series("train", "step")
    points_P = select_points(total_T, _CHART_POINTS)
    chosen = steps_T[points_P]
    columns: dict[str, list[float | None]] = {}
    for phase in PHASES:
        own_steps, own = run.timings.series("train", phase)
        if np.array_equal(own_steps, steps_T):
            columns[phase] = to_json_numbers(own[points_P], 5)
    return {"step": chosen.tolist(), "total": to_json_numbers(total_T[points_P], 5), "phases": columns}


def list_advice(shares: Mapping[str, float], run: RunReader) -> list[dict[str, str]]:
    """Return what would shorten a step, the largest share first."""
    config = run.flat_config()
    found: list[tuple[float, str, str]] = []
    share = shares.get("rollout", 0.0)
    if share > 0.5 and not config.get("max_weight_staleness"):
        text = "Waiting for rollouts is the largest part, and the trainer idles meanwhile: --max-weight-staleness 1 "
        found.append((share, text + "samples the next batch while this one is trained on.", "async_training.md"))
    elif share > 0.5:
        text = "Waiting for rollouts is the largest part although they overlap: add engines, or give the rollout "
        found.append((share, text + "plane more devices (--rollout-num-gpus).", "performance.md"))
    if share > 0.3 and (run.metrics.last("train", "truncated_ratio") or 0.0) > 0.1:
        text = "Truncated responses hold up their groups: --partial-rollout continues them in the next step."
        found.append((share * 0.8, text, "async_training.md"))
    if (share := shares.get("train", 0.0)) > 0.4:
        text = "Training is a large part: raise --max-tokens-per-gpu if memory allows, leave out "
        found.append((share, text + "--gradient-checkpointing, or train on more ranks.", "optimizers.md"))
    if (share := shares.get("publish", 0.0)) > 0.1:
        text = "Weight updates take more than a tenth of a step: use a faster transport between trainer and engines."
        found.append((share, text, "remote_engines.md"))
    if (share := shares.get("evaluate", 0.0)) > 0.2:
        found.append((share, "Evaluations take more than a fifth of the time: raise --eval-interval.", "train.md"))
    ratios_T = run.timings.series("train", "train/straggler_ratio")[1]
    if len(ratios_T) and float(np.median(ratios_T[-50:])) > 1.3:
        text = "The slowest rank takes 30% more time per token than the others: look at that machine."
        found.append((0.3, text, "fault_tolerance.md"))
    return [{"text": text, "page": page} for _, text, page in sorted(found, reverse=True)]
