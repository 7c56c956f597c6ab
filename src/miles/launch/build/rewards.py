"""Rewards of a run: the user's function or built-in graders, computed in this process or by a worker pool.

With workers, on this machine or on nodes of the reserved Ray cluster, a trajectory is sent as bytes; the worker
computes the same reward as this process would, and returns it, or why there is none, or an error that ends the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from miles.algo.config import DISTILLATION_ESTIMATOR
from miles.cluster.workers.local import LocalWorker, build_worker_spec
from miles.cluster.workers.pool import AllWorkersLost, WorkerHost, WorkerLost, WorkerPool
from miles.cluster.workers.process import WorkerHandler
from miles.core import errors
from miles.core.errors import HookError, MilesError, describe_error
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.serialization import CORE_TYPES, Codec, SerializationError
from miles.core.types import Prompt, Reward, Trajectory
from miles.hooks import registry
from miles.hooks.offload import offload_function
from miles.hooks.worker import HookWorker
from miles.launch.build.hooks import load_hook
from miles.launch.config import Config
from miles.launch.distributed.ray_placement import get_reservation
from miles.launch.runtime.run_directory import append_log_line
from miles.models.tokenizer import load_tokenizer
from miles.rollout.reward.build import build_grader_context
from miles.rollout.reward.context import RenderTokens
from miles.rollout.reward.mixture import build_builtin_group_reward, build_builtin_reward
from miles.rollout.reward.registry import is_group_rm
from miles.rollout.reward.types import GradingError, check_group_rewards, check_reward
from miles.rollout.sandbox.run import CodeSandbox

CODEC = Codec(CORE_TYPES)
# Seconds until a worker has imported all that its reward needs, on a busy machine.
_START_TIMEOUT = 300.0
_MAX_REASON_LENGTH = 2000


def build_rewards(
    config: Config, sandbox: Callable[[], CodeSandbox] | None = None
) -> tuple[RewardFn | None, GroupRewardFn | None]:
    """The function that scores a trajectory, or the one that scores a group; user functions are checked here."""
    r = config.rollout
    if r.custom_rm_path:
        if r.group_rm:
            return None, load_hook(config, registry.GROUP_REWARD)
        return load_hook(config, registry.REWARD), None
    if r.rm_type is None:
        return _return_zero if config.algo.advantage_estimator == DISTILLATION_ESTIMATOR else None, None

    def load_chat_template(folder: str) -> RenderTokens:
        tokenizer = load_tokenizer(folder, config.models.trust_remote_code)
        return lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=False)

    context = build_grader_context(r, environ=os.environ, render_tokens=load_chat_template, sandbox=sandbox)
    if r.group_rm or is_group_rm(r.rm_type):
        return None, build_builtin_group_reward(r.rm_type, context)
    return build_builtin_reward(r.rm_type, context), None


def name_reward(config: Config) -> str:
    """The flag that names the reward, for error messages."""
    r = config.rollout
    return f"--custom-rm-path {r.custom_rm_path}" if r.custom_rm_path else f"--rm-type {r.rm_type}"


async def _return_zero(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """The reward of pure distillation without a reward function."""
    return Reward(value=0.0)


# -- worker pool ----------------------------------------------------------------------------


def build_pooled_rewards(
    config: Config, logs: Path | None, worker: HookWorker, sandbox: Callable[[], CodeSandbox] | None = None
) -> tuple[RewardFn | None, GroupRewardFn | None, WorkerPool | None]:
    """The rewards of a run, computed by a worker pool where --reward-num-workers asks for one; it logs to ``logs``.

    Without a pool, the user's functions run in the ``worker``'s thread, and programs in the tools' ``sandbox``.
    """
    if not config.rollout.reward_num_workers:
        return *build_offloaded_rewards(config, worker, sandbox), None
    _, group_reward = build_rewards(config)
    pool = _build_worker_pool(config, partial(_log_to, logs))
    if group_reward is not None:
        return None, PooledGroupReward(pool), pool
    return PooledReward(pool), None, pool


def build_offloaded_rewards(
    config: Config, worker: HookWorker, sandbox: Callable[[], CodeSandbox] | None = None
) -> tuple[RewardFn | None, GroupRewardFn | None]:
    """The rewards, computed in this process; the user's functions run in the ``worker``'s thread."""
    reward, group_reward = build_rewards(config, sandbox)
    if config.rollout.custom_rm_path is not None:
        reward = reward and offload_function(worker, reward, "The reward function")
        group_reward = group_reward and offload_function(worker, group_reward, "The group reward function")
    return reward, group_reward


def _build_worker_pool(config: Config, log: Callable[[str], None]) -> WorkerPool:
    """The pool of --reward-num-workers workers, each started on first use."""
    r, cluster = config.rollout, get_reservation()
    names = (r.rm_token_env, r.reward_model_token_env, r.judge_token_env)
    secrets = {name: os.environ[name] for name in names if name is not None and name in os.environ}
    make = partial(build_worker_handler, config)
    specs = [build_worker_spec(f"reward worker {i}", make, secrets) for i in range(r.reward_num_workers)]
    hosts: list[WorkerHost]
    if cluster is None:
        hosts = [LocalWorker(spec, seconds=_START_TIMEOUT) for spec in specs]
    else:
        from miles.cluster.ray.workers import RayWorker

        hosts = [RayWorker(spec, index, cluster, seconds=_START_TIMEOUT) for index, spec in enumerate(specs)]
    return WorkerPool(hosts, max_concurrency=r.reward_worker_concurrency, log=log)


class PooledReward:
    """A core.protocols.RewardFn computed by a worker pool."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return (await _call_pool(self._pool, "one", prompt, (trajectory,)))[0]


class PooledGroupReward:
    """A core.protocols.GroupRewardFn computed by a worker pool."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        return await _call_pool(self._pool, "group", prompt, tuple(trajectories))


async def _call_pool(
    pool: WorkerPool, scope: str, prompt: Prompt, trajectories: tuple[Trajectory, ...]
) -> tuple[Reward, ...]:
    try:
        request = CODEC.pack(scope, (prompt, trajectories))
    except SerializationError as error:
        raise HookError(
            f"a trajectory of prompt {prompt.id} cannot be sent to the workers of --reward-num-workers: {error}."
        ) from error
    try:
        status, content = CODEC.unpack(await pool.call(request))
    except WorkerLost as error:
        raise GradingError(str(error)) from error
    except AllWorkersLost as error:
        raise HookError(f"rewards cannot be computed: {error} (--reward-num-workers).") from error
    if status == "failed":
        raise GradingError(content)
    if status == "stop":
        error_name, message = content
        raise _ERRORS.get(error_name, HookError)(message)
    return content


_ERRORS: dict[str, type[MilesError]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, MilesError)
}


def _log_to(logs: Path | None, text: str) -> None:
    if logs is not None:
        append_log_line(logs / "rewards.log", text)


# -- in the worker --------------------------------------------------------------------------


def build_worker_handler(config: Config) -> WorkerHandler:
    """The handler of a worker: computes the config's reward and serializes the result or the error."""
    reward, group_reward = build_rewards(config)
    source = name_reward(config)

    async def handle(request: bytes) -> bytes:
        scope, (prompt, trajectories) = CODEC.unpack(request)
        try:
            if scope == "group":
                assert group_reward is not None
                given = await group_reward(prompt, trajectories)
                rewards = check_group_rewards(given, source=source, prompt=prompt, count=len(trajectories))
            else:
                assert reward is not None
                rewards = (await reward(prompt, trajectories[0]),)
            return CODEC.pack("scored", tuple(check_reward(each, source=source, prompt=prompt) for each in rewards))
        except MilesError as error:
            return CODEC.pack("stop", (type(error).__name__, str(error)))
        except Exception as error:  # whatever a reward raises is why there is none
            reason = str(error) if isinstance(error, GradingError) else describe_error(error)
            return CODEC.pack("failed", reason[:_MAX_REASON_LENGTH])

    return handle
