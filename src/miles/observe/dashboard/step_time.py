"""Time of a step by phase, against the limit of the device, the slowest trajectories, and the option that would
shorten the largest share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.observe.dashboard.metric_store import select_points, to_json_numbers
from miles.observe.dashboard.run_reader import RunReader
from miles.observe.dashboard.time_limit import LIMIT, StepLimits, read_step_limits, split_by_cause
from miles.observe.metric import RATES
from miles.observe.rollouts import step_path

PHASES = ("rollout", "offload", "train", "publish")
_SPEEDS = frozenset(metric.name for metric in RATES)
_RATES = ("per_token", "ratio", "bytes")
_CHART_POINTS = 400
_SLOW_STEPS, _SLOW_ROWS = 20, 8


def split_step_time(run: RunReader, *, newest: int = 50, gauges: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the mean seconds of each phase and part over the ``newest`` steps, evaluations per step, and advice.

    ``gauges`` are means of the engines' gauges and the devices' counters, by name.
    """
    steps_T, total_T = run.timings.series("train", "step")
    if not len(steps_T):
        return {"steps": 0, "phases": [], "advice": [], "chart": None}
    first = int(steps_T[-newest:][0])
    mean = float(total_T[-newest:].mean())
    limits = read_step_limits(run, _mean_limits(run, first, len(steps_T[-newest:])))
    phases = [_build_phase(run, phase, first, limits) for phase in PHASES]
    known = sum(phase["seconds"] for phase in phases)
    phases.append({"name": "other", "seconds": max(0.0, mean - known), "parts": []})
    evaluation = _mean_evaluation(run, first, len(steps_T[-newest:]))
    if evaluation:
        phases.append({"name": "evaluate", "seconds": evaluation, "parts": []})
    whole = mean + evaluation
    for phase in phases:
        phase["share"] = phase["seconds"] / whole if whole else 0.0
        # Engines that overlap training generate during the whole step, and not only while the loop waits.
        compared = mean if limits.overlaps and phase["name"] == "rollout" else phase["seconds"]
        phase["of_limit"] = _divide(phase.get("limit"), compared)
    return {
        "steps": len(steps_T[-newest:]),
        "first_step": first,
        "last_step": int(steps_T[-1]),
        "seconds_per_step": whole,
        "phases": phases,
        "limit": _describe_limits(limits, phases, mean),
        "rates": _measure_rates(run, first),
        "groups": (groups := _summarize_groups(run, len(steps_T[-newest:]))),
        "advice": list_advice({phase["name"]: phase["share"] for phase in phases}, run, groups, gauges or {}),
        "chart": _build_chart(run),
    }


def _build_phase(run: RunReader, phase: str, first: int, limits: StepLimits) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"name": name, "seconds": (own := _mean_since(run, name, first))}
        | {"limit": (limit := limits.find_inside(name)), "of_limit": _divide(limit, own)}
        for name in run.timings.names("train")
        if name.startswith(f"{phase}/") and not name.endswith(_RATES)
    ]
    parts.sort(key=lambda part: -part["seconds"])
    return {
        "name": phase,
        "seconds": _mean_since(run, phase, first),
        "parts": parts,
        "limit": limits.find_inside(phase),
        "limits": [
            {"name": part.name, "seconds": part.seconds, "by_bound": dict(part.by_bound)}
            for part in limits.parts
            if part.name.startswith(f"{phase}/")
        ],
        "unknown": [{"name": name, "why": why} for name, why in limits.unknown.items() if name.startswith(f"{phase}/")],
    }


def _describe_limits(limits: StepLimits, phases: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """Return the limit of a whole step, of the plan, and the time by phase and cause."""
    if limits.why:
        return {"seconds": None, "why": limits.why}
    known = [phase for phase in phases if phase["name"] in PHASES]
    by_phase: dict[str, float] = {phase["name"]: phase["limit"] or 0.0 for phase in known}
    whole = sum(by_phase.values())
    if limits.concurrent:
        whole = max(by_phase["rollout"], whole - by_phase["rollout"])
    return {
        "seconds": whole,
        "of_limit": _divide(whole, seconds),
        "device": limits.device.get("name", ""),
        "source": limits.device.get("source", ""),
        "planned": limits.planned,
        "workload": limits.workload,
        "causes": split_by_cause(limits, phases),
        "why": "",
    }


def _mean_limits(run: RunReader, first: int, steps: int) -> dict[str, float]:
    """Return the mean limit of each part and bound over all steps, also those in which something else bounds it."""
    found: dict[str, float] = {}
    for name in run.timings.names("train"):
        if name.startswith(LIMIT):
            steps_T, values_T = run.timings.series("train", name)
            found[name] = float(values_T[steps_T >= first].sum()) / steps
    return found


def _divide(limit: float | None, seconds: float) -> float | None:
    return None if limit is None or seconds <= 0 else limit / seconds


def _summarize_groups(run: RunReader, steps: int) -> dict[str, float]:
    """Return the seconds of a group of the newest steps: the median, the 95th percentile, and the share of grading."""
    steps_T, tokens_T = run.metrics.series("train", "rollout_tokens")
    tickets_T, seconds_T = run.timings.series("group", "group")
    if not len(tickets_T) or not len(tokens_T):
        return {}
    count = max(1, round(len(tickets_T) / len(steps_T) * steps))
    newest = seconds_T[-count:]
    found = {"median": float(np.median(newest)), "p95": float(np.percentile(newest, 95))}
    for name in ("generate", "grade"):
        own = run.timings.series("group", name)[1][-count:]
        found[name] = float(own.mean()) if len(own) else 0.0
    return found


def list_slowest(run: RunReader) -> dict[str, Any]:
    """Return the trajectories of the newest steps that took longest to generate, and to grade."""
    import pyarrow.parquet as pq

    columns = ["branch", "ticket", "prompt_id", "trajectory", "status", "generate_seconds", "grade_seconds"]
    rows: list[dict[str, Any]] = []
    steps = run.rollout_steps()[-_SLOW_STEPS:]
    for step in steps:
        try:
            table = pq.read_table(step_path(run.path / "rollouts", step), columns=columns).to_pylist()
        except (OSError, ValueError, KeyError):  # a damaged file, or one of an earlier version without these columns
            continue
        own = [row for row in table if row["branch"] == 0]
        rows += [{"step": step, "index": index} | row for index, row in enumerate(own)]

    def select(name: str) -> list[dict[str, Any]]:
        timed = [row for row in rows if row[name]]
        return sorted(timed, key=lambda row: -row[name])[:_SLOW_ROWS]

    return {"steps": steps, "generate": select("generate_seconds"), "grade": select("grade_seconds")}


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
    return rates | {name: _mean_since(run, name, first) for name in run.timings.names("train") if name in _SPEEDS}


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


def list_advice(
    shares: Mapping[str, float], run: RunReader, groups: Mapping[str, float], gauges: Mapping[str, float]
) -> list[dict[str, str]]:
    """Return what would shorten a step, the largest share first."""
    found = [*_advise_rollout(shares.get("rollout", 0.0), run, groups, gauges), *_advise_training(shares, run)]
    return [{"text": text, "page": page} for _, text, page in sorted(found, reverse=True)]


def _advise_rollout(
    share: float, run: RunReader, groups: Mapping[str, float], gauges: Mapping[str, float]
) -> list[tuple[float, str, str]]:
    config = run.flat_config()
    found: list[tuple[float, str, str]] = []
    if share > 0.5 and not config.get("max_weight_staleness"):
        text = "Waiting for rollouts is the largest part, and the trainer idles meanwhile: --max-weight-staleness 1 "
        found.append((share, text + "samples the next batch while this one is trained on.", "async_training.md"))
    elif share > 0.5:
        text = "Waiting for rollouts is the largest part although they overlap: add engines, or give the rollout "
        found.append((share, text + "plane more devices (--rollout-num-gpus).", "performance.md"))
    if share > 0.3 and (run.metrics.last("train", "truncated_ratio") or 0.0) > 0.1:
        text = "Truncated responses hold up their groups: --partial-rollout continues them in the next step."
        found.append((share * 0.8, text, "async_training.md"))
    elif share > 0.3 and groups.get("p95", 0.0) > 2 * groups.get("median", 0.0) > 0:
        text = "One group in twenty takes more than twice the time of the others, and the step waits for it: "
        text += "--over-sampling-batch-size goes on without it, and --partial-rollout continues it later."
        found.append((share * 0.7, text, "async_training.md"))
    if share > 0.3 and groups.get("grade", 0.0) > 0.3 * (groups.get("generate", 0.0) + groups.get("grade", 0.0)):
        text = "Grading takes a third of a group's time or more (the slowest are below): --reward-num-workers grades "
        found.append((share * 0.9, text + "in processes of their own.", "rewards.md"))
    full = [name for name, value in gauges.items() if name.endswith(": kv_used") and value > 0.9]
    if share > 0.3 and any(gauges.get(name.replace("kv_used", "waiting"), 0.0) >= 1 for name in full):
        text = "Requests wait because the KV cache is full: raise --engine-memory-fraction, or use "
        found.append((share * 0.85, text + "--kv-cache-dtype fp8_e4m3.", "precision_kv_cache.md"))
    return found


def _advise_training(shares: Mapping[str, float], run: RunReader) -> list[tuple[float, str, str]]:
    """Return what would shorten training, weight updates and evaluations."""
    found: list[tuple[float, str, str]] = []
    if (share := shares.get("train", 0.0)) > 0.4:
        text = "Training is a large part: raise --max-tokens-per-gpu if memory allows, leave out "
        found.append((share, text + "--gradient-checkpointing, or train on more ranks.", "optimizers.md"))
    if (share := shares.get("offload", 0.0)) > 0.1:
        text = "Handing the device over takes more than a tenth of a step: a smaller --engine-memory-fraction or "
        found.append((share, text + "--engine-kv-tokens may let the optimizer state stay on the device.", "train.md"))
    if (share := shares.get("publish", 0.0)) > 0.1:
        text = "Weight updates take more than a tenth of a step: use a faster transport between trainer and engines."
        found.append((share, text, "remote_engines.md"))
    if (share := shares.get("evaluate", 0.0)) > 0.2:
        found.append((share, "Evaluations take more than a fifth of the time: raise --eval-interval.", "train.md"))
    ratios_T = run.timings.series("train", "train/straggler_ratio")[1]
    if len(ratios_T) and float(np.median(ratios_T[-50:])) > 1.3:
        text = "The slowest rank takes 30% more time per token than the others: look at that machine."
        found.append((0.3, text, "fault_tolerance.md"))
    return found
