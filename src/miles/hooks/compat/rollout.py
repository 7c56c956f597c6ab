"""Rollout and evaluation functions of upstream: one call makes the groups of a whole step, or evaluates all sets.

    run's loop   produce(prompt) x n ----> wanted prompts ...............................> groups, one for each
    own thread   generate_rollout(args, rollout_id, data_source): reads prompts, asks the engine, returns groups

The function may block, start threads and event loops of its own: each request reaches the engine on the run's loop.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from miles.core.errors import HookError, TrajectoryError
from miles.core.media import Images
from miles.core.protocols import Completion, Engine, Rollout, SamplingParams
from miles.core.types import UNSCORED, Group, Prompt, Reward, Status, Tokens, Trajectory
from miles.hooks.compat.convert import build_failed_trajectory, reward_from_upstream, trajectory_from_samples
from miles.hooks.compat.data_source import RolloutFnSource
from miles.hooks.compat.engine import RolloutRequests, record_requests, set_process_requests
from miles.hooks.compat.generation import run as run_coroutine
from miles.hooks.compat.types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
    UpstreamContext,
    UpstreamGroup,
)
from miles.hooks.guard import guard_hook

T = TypeVar("T")
Call = Callable[[UpstreamContext, int, RolloutFnSource, bool], Any]
"""A rollout function: the context, the number of the call, the data source, whether it evaluates."""


def build_call(hook: Any, source: str) -> Call:
    """Upstream's rollout function or class as one function; what it raises names ``source``."""
    instances: list[Any] = []

    def call(run: UpstreamContext, rollout_id: int, data_source: RolloutFnSource, evaluation: bool) -> Any:
        if not isinstance(hook, type):
            result = hook(run.args, rollout_id, data_source, evaluation=evaluation)
        else:
            if not instances:
                instances.append(cast(Any, hook)(RolloutFnConstructorInput(args=run.args, data_source=data_source)))
            kind = RolloutFnEvalInput if evaluation else RolloutFnTrainInput
            result = instances[0](kind(rollout_id=rollout_id))
        return run_coroutine(_await(result)) if inspect.isawaitable(result) else result

    return guard_hook(call, source, is_async=False)


async def _await(result: Any) -> Any:
    return await result


@dataclass(frozen=True, slots=True)
class LoopEngine:
    """A core.protocols.Engine for threads of a user's: requests are made on the run's loop."""

    loop: asyncio.AbstractEventLoop
    engine: Engine

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        if self.loop.is_closed():
            raise HookError("The run has ended, and with it its engine.")
        request = self.engine.generate(tokens, sampling, images)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(request, self.loop))  # pyright: ignore


@dataclass(slots=True)
class _Ticket:
    """A prompt that the run waits for."""

    prompt: Prompt
    sampling: SamplingParams
    group: asyncio.Future[Group]


class UpstreamRollout:
    """A core.hooks.RolloutFn that answers all prompts in flight with one call of upstream's rollout function.

    A call gets at most --rollout-batch-size prompts, and one follows the other. The function may return groups of
    other prompts it read; a group that nobody waits for is dropped.
    """

    def __init__(self, call: Call, run: UpstreamContext) -> None:
        self._call = call
        self._run = run
        self._source = RolloutFnSource(run)
        self._waiting: list[_Ticket] = []
        self._is_running = False
        self._calls = run.services.first_rollout
        self._requests: RolloutRequests | None = None

    async def __call__(
        self, prompt: Prompt, engine: Engine, sampling: SamplingParams, num_samples: int, default_rollout: Rollout
    ) -> Group:
        loop = asyncio.get_running_loop()
        ticket = _Ticket(prompt, sampling, loop.create_future())
        self._waiting.append(ticket)
        if self._requests is None:
            self._requests = RolloutRequests(run=self._run, engine=LoopEngine(loop, engine), sampling=sampling)
            set_process_requests(self._requests)
            self._source.next_prompt = self._make_draw(loop)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._start, loop)  # after all prompts that are admitted now
        return await ticket.group

    def _make_draw(self, loop: asyncio.AbstractEventLoop) -> Callable[[], Prompt] | None:
        next_prompt = self._run.services.next_prompt
        return None if next_prompt is None else lambda: _call_on_loop(loop, next_prompt)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        size = self._run.args.rollout_batch_size
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        for ticket in batch:
            self._source.want(ticket.prompt)
        assert self._requests is not None
        self._requests.begin(batch[0].sampling)
        run = replace(self._run, args=self._run.args.replace(rollout_batch_size=len(batch)))

        def work() -> list[Group]:
            output = self._call(run, self._calls - 1, self._source, False)
            groups = output.samples if isinstance(output, RolloutFnTrainOutput) else output
            return self._convert(groups, [ticket.prompt for ticket in batch])

        self._calls += 1
        _run_in_thread(self._requests, work, loop, lambda done: self._finish(loop, batch, done))

    def _finish(self, loop: asyncio.AbstractEventLoop, batch: list[_Ticket], done: Future[list[Group]]) -> None:
        waiting = [ticket for ticket in batch if not ticket.group.done()]
        error = done.exception()
        if error is not None:
            for ticket in waiting:
                ticket.group.set_exception(error)
            return
        for ticket, group in zip(batch, done.result(), strict=True):
            if not ticket.group.done():
                ticket.group.set_result(group)
        self._is_running = bool(self._waiting)
        if self._is_running:
            self._start(loop)

    def _convert(self, groups: Any, prompts: Sequence[Prompt]) -> list[Group]:
        """A group for each prompt: its own, where the function returned it, else another."""
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise HookError(f"{self._run.source} returns a list of groups, each a list of samples.")
        if len(groups) < len(prompts):
            raise HookError(
                f"{self._run.source} returned {len(groups)} groups, and args.rollout_batch_size is {len(prompts)}; "
                "return as many."
            )
        made = [self._convert_group(group, prompts[min(at, len(prompts) - 1)]) for at, group in enumerate(groups)]
        if all(t.status is Status.FAILED for group in made for t in group.trajectories):
            raise HookError(f"{self._run.source}: {made[0].trajectories[0].metadata.get('failure', 'all failed')}")
        wanted = {id(prompt) for prompt in prompts}
        own = {id(group.prompt): group for group in reversed(made)}
        others = [group for group in made if own.get(id(group.prompt)) is not group or id(group.prompt) not in wanted]
        return [own.get(id(prompt)) or others.pop(0) for prompt in prompts]

    def _convert_group(self, group: UpstreamGroup, default: Prompt) -> Group:
        first = group[0][0] if isinstance(group[0], list) else group[0]
        number = first.group_index
        prompt = default if number is None else self._source.prompts.pop(number, default)
        assert self._requests is not None
        return build_group(self._run, self._requests, prompt, group)


class UpstreamEvaluation:
    """A core.hooks.EvalFn that evaluates all sets with one call of upstream's function."""

    def __init__(self, call: Call, run: UpstreamContext) -> None:
        self._call = call
        self._run = run
        self._sets: dict[str, Sequence[Prompt]] = {}
        self._answer: asyncio.Future[tuple[RolloutRequests, Any]] | None = None
        self._calls = 0

    async def __call__(
        self, name: str, prompts: Sequence[Prompt], engine: Engine, sampling: SamplingParams, default_rollout: Rollout
    ) -> list[Group]:
        loop = asyncio.get_running_loop()
        self._sets[name] = prompts
        if self._answer is None:
            self._answer = loop.create_future()
            loop.call_soon(self._start, loop, engine, sampling)  # after all sets
        requests, output = await self._answer
        return self._convert(name, prompts, requests, output)

    def _start(self, loop: asyncio.AbstractEventLoop, engine: Engine, sampling: SamplingParams) -> None:
        sets, self._sets = self._sets, {}
        requests = RolloutRequests(
            run=self._run, engine=LoopEngine(loop, engine), sampling=sampling, held_out=sets, evaluation=True
        )
        answer, self._answer = self._answer, None
        assert answer is not None

        def work() -> Any:
            output = self._call(self._run, self._calls - 1, RolloutFnSource(self._run), True)
            return output.data if isinstance(output, RolloutFnEvalOutput) else output

        def finish(done: Future[Any]) -> None:
            error = done.exception()
            if not answer.done() and error is not None:
                answer.set_exception(error)
            elif not answer.done():
                answer.set_result((requests, done.result()))

        self._calls += 1
        _run_in_thread(requests, work, loop, finish)

    def _convert(self, name: str, prompts: Sequence[Prompt], requests: RolloutRequests, data: Any) -> list[Group]:
        found = data.get(name) if isinstance(data, Mapping) else None
        if not isinstance(found, Mapping) or "rewards" not in found:
            raise HookError(
                f"{self._run.source} returned no rewards of {name}; return a dict with 'rewards', 'truncated' and "
                "'samples' for each held-out set."
            )
        count = len(found["rewards"]) // max(len(prompts), 1)
        if count == 0 or count * len(prompts) != len(found["rewards"]):
            raise HookError(
                f"{self._run.source} returned {len(found['rewards'])} rewards for the {len(prompts)} prompts of "
                f"{name}; return the same number for each, in their order."
            )
        samples = found.get("samples") or [None] * len(found["rewards"])
        truncated = found.get("truncated") or [False] * len(found["rewards"])
        entries = list(zip(samples, found["rewards"], truncated, strict=True))
        return [
            Group(
                prompt=prompt,
                trajectories=tuple(
                    self._trajectory(requests, prompt, index, *entry)
                    for index, entry in enumerate(entries[at * count : (at + 1) * count])
                ),
            )
            for at, prompt in enumerate(prompts)
        ]

    def _trajectory(
        self, requests: RolloutRequests, prompt: Prompt, index: int, sample: Any, reward: Any, truncated: bool
    ) -> Trajectory:
        value = reward_from_upstream(self._run, reward)
        status = Status.TRUNCATED if truncated else Status.COMPLETED
        if sample is None:
            made = build_failed_trajectory(self._run, prompt, "")
            return replace(made, reward=value, index=index, status=status, metadata={"text": ""})
        made = _convert_entry(self._run, requests, prompt, sample)
        return replace(made, reward=value, index=index, status=status)


def build_group(run: UpstreamContext, requests: RolloutRequests, prompt: Prompt, group: UpstreamGroup) -> Group:
    """A group from upstream's; a trajectory whose tokens are not the engine's failed, and is not trained on."""
    trajectories = [_convert_entry(run, requests, prompt, entry) for entry in group]
    return Group(prompt=prompt, trajectories=tuple(replace(t, index=i) for i, t in enumerate(trajectories)))


def _convert_entry(run: UpstreamContext, requests: RolloutRequests, prompt: Prompt, entry: Any) -> Trajectory:
    try:
        return trajectory_from_samples(run, prompt, requests, entry)
    except TrajectoryError as error:
        failed = build_failed_trajectory(run, prompt, str(error))
        return replace(failed, reward=Reward(value=0.0), metadata={**failed.metadata, UNSCORED: str(error)})


# -- threads --------------------------------------------------------------------------------


def _run_in_thread(
    requests: RolloutRequests,
    work: Callable[[], T],
    loop: asyncio.AbstractEventLoop,
    finish: Callable[[Future[T]], None],
) -> None:
    """Call ``work`` in a thread of its own, and ``finish`` on the loop with its result or error."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # what a user's function raises ends the run, not its thread
            done.set_exception(error)
        with suppress(RuntimeError):  # the run has ended
            loop.call_soon_threadsafe(finish, done)

    with record_requests(requests):
        context = copy_context()
    threading.Thread(target=context.run, args=(run,), name="rollout-function", daemon=True).start()


def _call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T]) -> T:
    """Call ``function`` on the loop, from another thread."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    loop.call_soon_threadsafe(call)
    return result.result()


# -- adapters -------------------------------------------------------------------------------


def adapt_rollout(hook: Any, run: UpstreamContext) -> UpstreamRollout:
    """``f(args, rollout_id, data_source, evaluation=False)``, or a class called with ``RolloutFnTrainInput``."""
    return UpstreamRollout(build_call(hook, run.source), run)


def adapt_evaluation(hook: Any, run: UpstreamContext) -> UpstreamEvaluation:
    """The same function or class, called with ``evaluation=True`` or ``RolloutFnEvalInput``."""
    return UpstreamEvaluation(build_call(hook, run.source), run)


def is_batch_function(hook: Any) -> bool:
    """Whether a rollout or evaluation function is upstream's: it has a thread and error messages of its own."""
    return isinstance(hook, UpstreamRollout | UpstreamEvaluation)
