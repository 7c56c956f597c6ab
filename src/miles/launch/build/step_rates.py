"""Rates of each step (FLOPs and bytes per second), and the least time that its tokens could have taken (roofline)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.device_peaks import DevicePeak
from miles.cluster.platform import Platform, measure_cpu_peak
from miles.core.types import Author, Group
from miles.launch.build.policies import PolicySpec
from miles.launch.config import Config
from miles.launch.plan.step_limit import (
    LIMITS_FILE,
    MEASURED,
    DeviceLimit,
    build_step_model,
    describe_product,
    estimate_step_limit,
    limit_parts,
    list_timings,
    read_device_limit,
    with_given_flops,
)
from miles.launch.plan.topology import get_split
from miles.launch.runtime.run_directory import write_atomically
from miles.models.accounting.step_limit import StepModel, StepWorkload
from miles.models.accounting.utilization import UtilizationMeter
from miles.observe.start_timer import StartTimer

_ACCEPTED = "speculative/accept_length"
_AUTHORS = tuple(Author)


class StepRates:
    """Measures each step from its groups, its metrics, and the counters of engines in this process.

    ``limits`` is None where the limit of a step is not known. The first step has the phases of ``timer`` too.
    """

    def __init__(
        self,
        main: PolicySpec,
        engines: Sequence[NativeEngine],
        limits: tuple[StepModel, DevicePeak] | None,
        timer: StartTimer | None = None,
    ) -> None:
        config, policy = main.config, main.checkpoint
        peak, given = policy.platform.peak, config.observe.mfu_peak_tflops
        split = get_split(config)
        self._engines = engines
        self._limits = limits
        self._timer = timer
        self._counters: dict[str, float] = {}
        self._meter = UtilizationMeter(
            spec=policy.rollout_spec,
            rollout_dtype=str(policy.rollout_dtype).removeprefix("torch."),
            numerics=policy.numerics,
            train_devices=main.plan.layout.world,
            rollout_devices=max(1, split.engines) * config.cluster.rollout_num_gpus_per_engine,
            peak_flops=given * 1e12 if given else None if peak is None else peak.flops,
            peak_bandwidth=None if peak is None else peak.bandwidth,
            backward=1.0 if config.lora.is_enabled else 2.0,
            overlaps=config.schedule.max_weight_staleness > 0,
        )

    def __call__(
        self, groups: Sequence[Group], metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> Mapping[str, float]:
        counters = Counter[str]()
        for engine in self._engines:
            counters.update(engine.stats())
        grown = {name: value - self._counters.get(name, 0.0) for name, value in counters.items()}
        self._counters = dict(counters)
        phases = {name: value for name, value in seconds.items() if "/" not in name}
        rates = self._meter.measure(metrics, phases, grown) | self._limit_step(groups, metrics, seconds)
        return rates | self._finish_start(phases, grown)

    def _finish_start(self, phases: Mapping[str, float], counters: Mapping[str, float]) -> dict[str, float]:
        """Return the phases of the start of the run, after its first step."""
        timer, self._timer = self._timer, None
        if timer is None:
            return {}
        for name in ("graphs_captured", "graph_seconds"):
            if counters.get(name):
                timer.add(name, counters[name])
        return timer.finish(phases)

    def _limit_step(
        self, groups: Sequence[Group], metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        if self._limits is None:
            return {}
        model, peak = self._limits
        workload = count_workload(groups, shared=metrics.get("tokens_shared", 0.0))
        accepted = max(1.0, seconds.get(_ACCEPTED, 1.0))
        return list_timings(limit_parts(model, workload, peak, tokens_per_step=accepted))


def build_step_rates(
    config: Config, main: PolicySpec, engines: Sequence[NativeEngine], timer: StartTimer | None = None
) -> StepRates:
    """The rates of the main policy's steps; writes ``limits.json`` to the run directory."""
    plan, spec = main.plan, main.checkpoint.spec
    device = find_run_device(main.config, plan.run_dir, main.checkpoint.platform)
    limit = estimate_step_limit(config, plan, spec, device)
    write_atomically(plan.run_dir / LIMITS_FILE, json.dumps(limit.as_json(), indent=2) + "\n")
    model = build_step_model(config, plan, spec)
    limits = None if model is None or device.peak is None else (model, device.peak)
    return StepRates(main, engines, limits, timer)


def find_run_device(config: Config, run_dir: Path, platform: Platform) -> DeviceLimit:
    """The peak of the run's device: of its data sheet, or of a CPU as it was measured once for the run."""
    given = config.observe.mfu_peak_tflops
    if platform.kind != "cpu":
        return with_given_flops(describe_product(platform.name), given)
    stored = read_device_limit(run_dir)
    if stored is not None and (stored.name, stored.source) == (platform.name, MEASURED):
        return stored if given is None else with_given_flops(stored, given)
    measured = DeviceLimit(name=platform.name, source=MEASURED, peak=measure_cpu_peak())
    return with_given_flops(measured, given)


def count_workload(groups: Sequence[Group], *, shared: float = 0.0) -> StepWorkload:
    """The tokens of a step's groups; each branch of a trajectory is a response and a training sample of its own."""
    prompts: list[int] = []
    responses: list[tuple[int, ...]] = []
    sequences: list[int] = []
    inserted = 0
    for group in groups:
        prompt = 0
        sampled: list[int] = []
        for branch in (branch for trajectory in group.trajectories for branch in trajectory.branches):
            counts = dict.fromkeys(_AUTHORS, 0)
            for span in branch:
                counts[span.author] += len(span.tokens)
            from_prompt, from_policy, from_env = counts.values()
            prompt = max(prompt, from_prompt)
            sampled.append(from_policy)
            inserted += from_env
            sequences.append(from_prompt + from_policy + from_env)
        prompts.append(prompt)
        responses.append(tuple(sampled))
    return StepWorkload(
        prompts=tuple(prompts),
        responses=tuple(responses),
        inserted=inserted,
        sequences=tuple(sequences),
        shared=shared,
    )
