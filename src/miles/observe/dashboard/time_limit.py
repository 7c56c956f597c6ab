"""Time limit of the newest steps (roofline): by phase, part and what bounds it, from the run's files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miles.observe.dashboard.run_reader import RunReader

LIMIT = "limit/"
LIMITS_FILE = "limits.json"
NO_FILE = "the run has no limits.json, which earlier versions did not write"
SEVERAL = "the run's steps have none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """The least seconds of a part of a step, by what bounds it, and the measured time that it is part of."""

    name: str
    inside: str
    by_bound: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.by_bound.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of a mean step, and of the plan's; ``unknown`` are parts without one, with the reasons.

    ``why`` says why there is no limit at all.
    """

    parts: tuple[PartLimits, ...] = ()
    unknown: Mapping[str, str]
    device: Mapping[str, Any]
    workload: str = ""
    planned: float | None = None
    overlaps: bool = False
    concurrent: bool = False
    why: str = ""

    def find_inside(self, measured: str) -> float | None:
        """Return the least seconds of what a measured time has; None where no part of it has a limit."""
        own = [part.seconds for part in self.parts if part.inside == measured or part.inside.startswith(f"{measured}/")]
        return sum(own) if own else None


def read_step_limits(run: RunReader, seconds: Mapping[str, float]) -> StepLimits:
    """Return the limits of a run, with the ``seconds`` of its mean step by the names of its timings."""
    try:
        stored = json.loads((run.path / LIMITS_FILE).read_text(encoding="utf-8"))
        planned = {part["name"]: part for part in stored["parts"]}
        device, whole = dict(stored["device"]), stored["seconds"]
    except (OSError, ValueError, KeyError, TypeError):
        return StepLimits(unknown={}, device={}, why=NO_FILE)
    parts = tuple(_collect_parts(seconds, planned))
    return StepLimits(
        parts=parts,
        unknown={name: part["why"] for name, part in planned.items() if part["why"]},
        device=device,
        workload=stored.get("workload", ""),
        planned=whole,
        overlaps=bool(stored.get("overlaps")),
        concurrent=bool(stored.get("concurrent")),
        why="" if any(part.by_bound for part in parts) else device.get("why") or stored.get("why") or SEVERAL,
    )


def _collect_parts(seconds: Mapping[str, float], planned: Mapping[str, Mapping[str, Any]]) -> Iterable[PartLimits]:
    found: dict[str, dict[str, float]] = {}
    for name, value in seconds.items():
        if name.startswith(LIMIT):
            part, _, bound = name.removeprefix(LIMIT).rpartition("/")
            found.setdefault(part, {})[bound] = value
    # A part that moves nothing, such as the update of weights that are shared, has no timing.
    found |= {name: {} for name, part in planned.items() if part["seconds"] == 0 and name not in found}
    for name, by_bound in found.items():
        inside = planned[name]["inside"] if name in planned else name.partition("/")[0]
        yield PartLimits(name=name, inside=inside, by_bound=by_bound)


def split_by_cause(limits: StepLimits, phases: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the seconds of each phase by what bounds them at the device's peak, and those beyond the limit.

    Where generation overlaps training, the wait for it is a cause of its own.
    """
    causes: list[dict[str, Any]] = []
    for phase in phases:
        own = [part for part in limits.parts if part.name.startswith(f"{phase['name']}/")]
        if limits.overlaps and phase["name"] == "rollout":
            causes.append({"phase": "rollout", "cause": "waiting", "seconds": phase["seconds"]})
            continue
        bounds: dict[str, float] = {}
        for part in own:
            for bound, seconds in part.by_bound.items():
                bounds[bound] = bounds.get(bound, 0.0) + seconds
        # A measured peak may be exceeded for a moment; no phase is longer than it was.
        scale = min(1.0, phase["seconds"] / total) if (total := sum(bounds.values())) else 1.0
        causes += [{"phase": phase["name"], "cause": name, "seconds": each * scale} for name, each in bounds.items()]
        beyond = phase["seconds"] - total * scale
        causes.append({"phase": phase["name"], "cause": "beyond" if own else "no limit known", "seconds": beyond})
    return causes
