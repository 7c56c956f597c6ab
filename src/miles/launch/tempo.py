"""Tempo as a run is wired for it: what is cut and taken up, how much is under way, what new weights interrupt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles.algo.credit import newest_only
from miles.core.protocols import Credit, WeightSync
from miles.core.types import Version
from miles.launch.config import Config
from miles.rollout.throttle import Throttle


def spare_groups(config: Config) -> int:
    """Groups that enter a step beyond those it needs."""
    entering = config.tempo.over_sampling_batch_size
    recorded = config.observe.load_debug_rollout_data is not None  # what was cut then is not among it
    return 0 if entering is None or recorded else entering - config.rollout.rollout_batch_size


class Told(Protocol):
    """What tempo asks of an engine."""

    async def abort(self) -> object: ...
    async def health(self) -> Mapping[str, float]: ...


def manner_of(config: Config, engine: Told) -> dict[str, Any]:
    """What a Producer is told of tempo."""
    t = config.tempo
    throttle = None
    if t.async_max_concurrent_samples is not None or t.adaptive_concurrency:
        r, entering = config.rollout, t.over_sampling_batch_size or config.rollout.rollout_batch_size
        most = (config.schedule.max_weight_staleness + 1) * entering * r.n_samples_per_prompt
        throttle = Throttle(
            t.async_max_concurrent_samples or most,
            by=t.rollout_submission_granularity if t.async_max_concurrent_samples is not None else "sample",
            pressure=engine.health if t.adaptive_concurrency else None,
        )
    return {"abort": engine.abort, "throttle": throttle, "renew": t.pause_generation_mode == "abort"}


def credited(config: Config, credit: Credit) -> Credit:
    """Credit that leaves out what older weights wrote, where it is asked to."""
    return newest_only(credit) if config.tempo.mask_offpolicy_in_partial_rollout else credit


def notes_of_tempo(config: Config) -> tuple[str, ...]:
    """Where the mode that was asked for, or is the default, is not what engines can do."""
    mode = config.tempo.pause_generation_mode
    stock = config.sglang.rollout_backend == "sglang"
    if mode == "abort" or not stock or config.schedule.max_weight_staleness == 0:
        return ()
    return (
        f"New weights end requests under way, which are asked again from where they were (abort): SGLang tells one "
        f"version a reply, so that --pause-generation-mode {mode} would not leave versions exact per token.",
    )


class Pausable(Protocol):
    """An engine that can be told to rest, and what becomes of its requests."""

    async def pause(self, mode: Any = ...) -> None: ...
    async def resume(self) -> None: ...


class Interrupting:
    """A WeightSync whose engines rest while weights come (see core.protocols.WeightSync)."""

    def __init__(self, sync: WeightSync, engines: Sequence[Pausable], mode: str) -> None:
        self._sync, self._engines, self._mode = sync, tuple(engines), mode

    async def publish(self, version: Version) -> Mapping[str, float]:
        try:
            for engine in self._engines:
                await engine.pause(self._mode)
            return await self._sync.publish(version)
        finally:
            for engine in self._engines:
                await engine.resume()


def sync_of_tempo(config: Config, sync: WeightSync, engines: Sequence[Pausable]) -> WeightSync:
    """The way weights come to engines of this process, when attempts may be under way; servers see to it themselves."""
    mode = config.tempo.pause_generation_mode
    if mode == "in_place" or config.schedule.max_weight_staleness == 0:
        return sync  # nothing is under way, or it may stay as it is
    return Interrupting(sync, engines, mode)
