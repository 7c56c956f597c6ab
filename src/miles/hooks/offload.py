"""User functions off the event loop: each protocol's hook wrapped so that it runs in a worker thread (see worker)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

from miles.core.errors import HookRuntimeError
from miles.core.hooks import EvalFn, RolloutFn
from miles.core.media import Images
from miles.core.protocols import (
    Completion,
    Engine,
    Generate,
    OnTokens,
    Rollout,
    SamplingParams,
    stream_or_generate,
)
from miles.core.types import Group, Prompt, Tokens, Trajectory
from miles.hooks.worker import HookWorker

T = TypeVar("T")


def offload_function(worker: HookWorker, function: Callable[..., Any], name: str) -> Any:
    """An async function that needs nothing of the run's loop, such as a reward, a tool or an agent over HTTP."""

    @wraps(function, updated=())
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await worker.run(partial(function, *args, **kwargs), name)

    return call


def offload_generate(worker: HookWorker, generate: Generate, name: str) -> Generate:
    """A generate function; its engine requests are made on the run's loop."""
    kind = OffloadedGenerate if getattr(generate, "resume", None) is None else OffloadedResumableGenerate
    return kind(worker, generate, name)


class OffloadedGenerate:
    """A core.protocols.Generate that calls a user's generate function in the worker thread."""

    def __init__(self, worker: HookWorker, generate: Any, name: str) -> None:
        self._worker = worker
        self._generate = generate
        self._name = name

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        proxy = MainLoopEngine(self._worker, engine)
        return await self._worker.run(partial(self._generate, prompt, proxy, sampling), self._name)


class OffloadedResumableGenerate(OffloadedGenerate):
    """A core.protocols.ResumableGenerate: partial trajectories are continued by the user's ``resume``."""

    async def resume(
        self, prompt: Prompt, partial_trajectory: Trajectory, engine: Engine, sampling: SamplingParams
    ) -> Trajectory:
        proxy = MainLoopEngine(self._worker, engine)
        call = partial(self._generate.resume, prompt, partial_trajectory, proxy, sampling)
        return await self._worker.run(call, self._name)


def offload_rollout(worker: HookWorker, make_group: RolloutFn, name: str) -> RolloutFn:
    """A rollout function; the engine and the default rollout are used on the run's loop."""

    async def call(
        prompt: Prompt, engine: Engine, sampling: SamplingParams, num_samples: int, default_rollout: Rollout
    ) -> Group:
        proxies = MainLoopEngine(worker, engine), sampling, num_samples, MainLoopRollout(worker, default_rollout)
        return await worker.run(partial(make_group, prompt, *proxies), name)

    return call


def offload_evaluation(worker: HookWorker, evaluate: EvalFn, title: str) -> EvalFn:
    """An evaluation function; the engine and the default rollout are used on the run's loop."""

    async def call(
        name: str, prompts: Sequence[Prompt], engine: Engine, sampling: SamplingParams, default_rollout: Rollout
    ) -> Sequence[Group]:
        proxies = MainLoopEngine(worker, engine), sampling, MainLoopRollout(worker, default_rollout)
        return await worker.run(partial(evaluate, name, prompts, *proxies), title)

    return call


class HookCaller:
    """Calls synchronous hooks in the worker's thread, within ``seconds``; without a worker, here and now."""

    def __init__(self, worker: HookWorker | None, seconds: float) -> None:
        self._worker = worker
        self._seconds = seconds

    async def __call__(self, hook: Callable[[], T], name: str) -> T:
        if self._worker is None:
            return hook()
        limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                return await self._worker.run_sync(hook, name)
        except TimeoutError:
            if not limit.expired():
                raise
            raise HookRuntimeError(
                f"{name} did not return within {self._seconds:g} s (--stall-timeout); give what it waits for a time "
                "limit, and the same command resumes the run"
            ) from None


class MainLoopEngine:
    """A core.protocols.StreamingEngine for a user function: requests are made on the run's loop."""

    def __init__(self, worker: HookWorker, engine: Engine) -> None:
        self._worker = worker
        self._engine = engine

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        return await self._worker.run_on_main_loop(partial(self._engine.generate, tokens, sampling, images))

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        forward = self._worker.post(on_tokens)
        return await self._worker.run_on_main_loop(
            partial(stream_or_generate, self._engine, tokens, sampling, forward, images)
        )


class MainLoopRollout:
    """A core.protocols.Rollout for a user function: groups are produced on the run's loop."""

    def __init__(self, worker: HookWorker, rollout: Rollout) -> None:
        self._worker = worker
        self._rollout = rollout

    async def produce(self, prompt: Prompt) -> Group:
        return await self._worker.run_on_main_loop(partial(self._rollout.produce, prompt))
