"""Policies, engines and trainers for a loop of one's own: sample, score, forward_backward, optim_step, publish.

    sample ---> score ---> forward_backward ---> optim_step ---> publish ---> sample ...
    engine      caller     trainer               trainer         trainer's weights to the engine

Everything runs on an event loop in a thread of the policy's own. Every verb has a plain form, which waits for it, and
an async one (``sample_async``). Engine and trainer share one device and take turns, so a verb of one waits for those of
the other; with ``max_weight_staleness`` above 0 they overlap, and the engine has a copy of the published weights.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Literal, Self

from miles.api.learner import Learner, LossLike, find_state
from miles.api.loop_thread import LoopThread
from miles.api.options import build_argv, list_algorithm_options
from miles.api.records import Data
from miles.api.sampler import PromptLike, RewardLike, Sampler
from miles.api.samples import PolicySample
from miles.cluster.executor import Executor
from miles.core.errors import UsageError
from miles.core.protocols import Lease, WeightSync
from miles.core.types import Floats, Prompt, Version
from miles.kernels.numerics import configure_cublas
from miles.launch.build.engines import RolloutEngine, load_engine
from miles.launch.build.generation import Generation, build_generation
from miles.launch.build.models import read_policy
from miles.launch.build.policies import build_advantages, build_stack, read_policies
from miles.launch.build.run import mask_stale_tokens
from miles.launch.config import Config
from miles.launch.distributed.driver import set_train_env_vars
from miles.launch.distributed.resilient_trainer import RecoveryState
from miles.launch.plan.plan import Plan
from miles.launch.read_config import read
from miles.observe.start_timer import StartTimer
from miles.schedule.checkpoints import CheckpointDirectory
from miles.schedule.device_lease import DisjointLease


class DeviceTurns:
    """Which half holds the device: many samplers at once, or one verb of the trainer.

    With ``overlap`` both may work at the same time, and only the verbs of the trainer wait for each other.
    """

    def __init__(self, lease: Lease, *, overlap: bool) -> None:
        self._lease = lease
        self._overlap = overlap
        self._changed = asyncio.Condition()
        self._holder: Literal["rollout", "train"] | None = None
        self._num_sampling = 0
        self._is_training = False

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._overlap or not self._is_training)
            if self._holder != "rollout" and not self._overlap:
                await self._lease.to_rollout()
                self._holder = "rollout"
            self._num_sampling += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_sampling -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_training and (self._overlap or not self._num_sampling))
            if self._holder != "train" and not self._overlap:
                await self._lease.to_train()
                self._holder = "train"
            self._is_training = True
        try:
            yield
        finally:
            async with self._changed:
                self._is_training = False
                self._changed.notify_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What a policy, an engine or a trainer of the library is made of."""

    sampler: Sampler
    learner: Learner | None
    sync: WeightSync | None
    turns: DeviceTurns
    generation: Generation
    engines: tuple[RolloutEngine, ...]
    executors: tuple[Executor, ...]
    shares_weights: bool

    async def close(self) -> None:
        await self.generation.close()
        for engine in self.engines:
            await engine.close()
        for executor in self.executors:
            executor.close()


class _Handle:
    """A policy, engine or trainer on its own event loop, which ``close`` or the end of a ``with`` frees."""

    def __init__(self, model: str | PurePath, build: Callable[[str], Any]) -> None:
        self._loop = LoopThread(f"miles {model}")
        try:
            self._parts: PolicyParts | None = self._loop.run(lambda: build(os.fspath(model)))
        except BaseException:
            self._loop.close()
            raise
        self._published: Version | None = None

    def read_prompts(self, data: Data) -> list[Prompt]:
        """The prompts of rows or of a path, as a run reads them; ``metadata["record"]`` is a prompt's row."""
        return self._get_parts().sampler.read_prompts(data)

    def close(self) -> None:
        """Free the device; closing it again does nothing."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            self._loop.run(parts.close)
            self._loop.close()

    async def close_async(self) -> None:
        """As ``close``."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close_async()

    def _get_parts(self) -> PolicyParts:
        if self._parts is None:
            raise UsageError("this policy is closed; open another one.")
        return self._parts


class _SamplingVerbs(_Handle):
    """The verbs of an engine."""

    def sample(self, prompts: PromptLike | Sequence[PromptLike], n: int = 1, **sampling: Any) -> list[PolicySample]:
        """Sample ``n`` responses to each prompt, those of one prompt after another.

        A prompt is a text, chat messages, a row of data, or one of ``read_prompts``. ``sampling`` are ``temperature``,
        ``top_p``, ``top_k``, ``min_p``, ``max_new_tokens``, ``stop``, ``stop_token_ids``, ``ignore_eos`` and ``seed``,
        by default those of the options. With a ``seed`` the same call gives the same samples; without one, a prompt
        that is sampled again gets others. Samples to train on need the policy's own temperature
        (``rollout_temperature``), at which the trainer computes its log-probs.
        """
        return self._loop.run(partial(self._sample, prompts, n, sampling))

    async def sample_async(
        self, prompts: PromptLike | Sequence[PromptLike], n: int = 1, **sampling: Any
    ) -> list[PolicySample]:
        """As ``sample``; several calls at once share the engine's batches."""
        return await self._loop.wait(partial(self._sample, prompts, n, sampling))

    def score(self, samples: Sequence[PolicySample], reward: RewardLike | None = None) -> list[PolicySample]:
        """The samples with rewards.

        ``reward`` is a function as ``miles.train`` takes it, the name of a built-in reward, or one number for each
        sample; by default what the options name. A sample whose reward raises is not trained on, as in a run.
        """
        return self._loop.run(lambda: self._get_parts().sampler.score(samples, reward))

    async def score_async(
        self, samples: Sequence[PolicySample], reward: RewardLike | None = None
    ) -> list[PolicySample]:
        """As ``score``."""
        return await self._loop.wait(lambda: self._get_parts().sampler.score(samples, reward))

    async def _sample(
        self, prompts: PromptLike | Sequence[PromptLike], n: int, sampling: Mapping[str, Any]
    ) -> list[PolicySample]:
        parts = self._get_parts()
        if n < 1:
            raise UsageError(f"sample() takes n of at least 1, not {n}.")
        async with parts.turns.sampling():
            self._check_published(parts)
            return await parts.sampler.sample(prompts, n, sampling)

    def _check_published(self, parts: PolicyParts) -> None:
        if parts.learner is None or not parts.shares_weights:
            return
        if parts.learner.trainer.version != self._published:
            raise UsageError(
                "the weights were updated since they were published, and the engine shares them; call publish() before "
                "sample(), or open the policy with max_weight_staleness=1 to sample from the published weights."
            )


class _TrainingVerbs(_Handle):
    """The verbs of a trainer."""

    @property
    def version(self) -> int:
        """The number of updates that the trainer's weights have seen."""
        return self._get_learner().trainer.version.number

    def read_demonstrations(self, data: Data) -> list[PolicySample]:
        """The demonstrations of rows or of a path as samples, for ``loss="sft"``.

        The response is the column ``label_key``, or the last assistant message. A policy opened with
        ``algorithm="dpo"`` reads pairs of responses, each pair as two samples.
        """
        return self._loop.run(lambda: self._get_parts().sampler.read_demonstrations(data))

    def forward_backward(
        self,
        samples: Sequence[PolicySample],
        loss: LossLike | None = None,
        advantages: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """Add the gradient of a loss on ``samples`` to that of earlier calls; returns its metrics.

        ``loss`` is the name of an algorithm (``grpo``, ``cispo``, ``sft``, ...), by default the one the policy was
        opened with, or a function of any of ``logprobs``, ``old_logprobs``, ``sampled_logprobs``, ``ref_logprobs``,
        ``advantages``, ``entropy`` and ``mean``: tensors with an entry for each trained token, and a function that
        averages over all of them. It returns a value per token, which is averaged, or a scalar, which is added up over
        micro-batches. Advantages are those of the algorithm, from the rewards of consecutive samples of the same
        prompt, unless ``advantages`` has one number for each sample.
        """
        return self._loop.run(partial(self._forward_backward, samples, loss, advantages))

    async def forward_backward_async(
        self,
        samples: Sequence[PolicySample],
        loss: LossLike | None = None,
        advantages: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """As ``forward_backward``."""
        return await self._loop.wait(partial(self._forward_backward, samples, loss, advantages))

    def optim_step(self, lr: float | None = None) -> dict[str, float]:
        """Update the weights by the gradient so far; ``lr`` replaces the learning rate of the options."""
        return self._loop.run(partial(self._optim_step, lr))

    async def optim_step_async(self, lr: float | None = None) -> dict[str, float]:
        """As ``optim_step``."""
        return await self._loop.wait(partial(self._optim_step, lr))

    def log_probs(self, samples: Sequence[PolicySample]) -> list[Floats]:
        """The trainer's log-prob of each response token of each sample, under its current weights."""
        return self._loop.run(partial(self._log_probs, samples))

    async def log_probs_async(self, samples: Sequence[PolicySample]) -> list[Floats]:
        """As ``log_probs``."""
        return await self._loop.wait(partial(self._log_probs, samples))

    def save_state(self, path: str | PurePath) -> Path:
        """Write weights, optimizer and seeds to a folder in ``path``, complete or not at all; returns that folder.

        It is a Hugging Face checkpoint, which ``miles.open`` opens too.
        """
        return self._loop.run(partial(self._save_state, Path(path)))

    async def save_state_async(self, path: str | PurePath) -> Path:
        """As ``save_state``."""
        return await self._loop.wait(partial(self._save_state, Path(path)))

    def load_state(self, path: str | PurePath) -> None:
        """Continue exactly where ``save_state`` was called, with the weights published.

        ``path`` is what ``save_state`` was given or returned, or the directory of a run.
        """
        self._loop.run(partial(self._load_state, Path(path)))

    async def load_state_async(self, path: str | PurePath) -> None:
        """As ``load_state``."""
        await self._loop.wait(partial(self._load_state, Path(path)))

    def _get_learner(self) -> Learner:
        learner = self._get_parts().learner
        assert learner is not None, "this policy trains"
        return learner

    async def _forward_backward(
        self, samples: Sequence[PolicySample], loss: LossLike | None, advantages: Sequence[float] | None
    ) -> dict[str, float]:
        async with self._get_parts().turns.training():
            return await self._get_learner().forward_backward(samples, loss, advantages)

    async def _optim_step(self, lr: float | None) -> dict[str, float]:
        async with self._get_parts().turns.training():
            return dict((await self._get_learner().trainer.optim_step(lr)).metrics)

    async def _log_probs(self, samples: Sequence[PolicySample]) -> list[Floats]:
        async with self._get_parts().turns.training():
            return await self._get_learner().log_probs(samples)

    async def _save_state(self, path: Path) -> Path:
        parts = self._get_parts()
        async with parts.turns.training():
            return await self._get_learner().save(path, parts.sampler.state())

    async def _load_state(self, path: Path) -> None:
        parts = self._get_parts()
        find_state(path)  # what cannot be loaded changes nothing
        async with parts.turns.training():
            parts.sampler.load(await self._get_learner().load(path))
            await self._publish(parts)

    async def _publish(self, parts: PolicyParts) -> None:
        version = self._get_learner().trainer.version
        if parts.sync is not None:
            await parts.sync.publish(version)
        self._published = version


class Policy(_SamplingVerbs, _TrainingVerbs):
    """An engine and a trainer of one model, on one device: all verbs. Open one with ``miles.open``."""

    def __init__(self, model: str | PurePath, *, algorithm: str = "grpo", **options: Any) -> None:
        super().__init__(model, partial(_build_policy, algorithm=algorithm, options=options, samples=True))
        try:
            self._loop.run(lambda: self._publish(self._get_parts()))  # before either half has the device, as in a run
        except BaseException:
            self.close()
            raise

    def publish(self) -> int:
        """Have the engine sample from the trainer's weights from now on; returns their version."""
        return self._loop.run(self._publish_weights)

    async def publish_async(self) -> int:
        """As ``publish``."""
        return await self._loop.wait(self._publish_weights)

    async def _publish_weights(self) -> int:
        parts = self._get_parts()
        async with parts.turns.training():
            await self._publish(parts)
        return self.version


class EngineHandle(_SamplingVerbs):
    """``miles.Engine``: the engine of a checkpoint alone, which samples and scores."""

    def __init__(self, model: str | PurePath, **options: Any) -> None:
        super().__init__(model, partial(_build_engine, options=options))


class TrainerHandle(_TrainingVerbs):
    """``miles.Trainer``: the trainer of a checkpoint alone, for demonstrations and for samples of another engine."""

    def __init__(self, model: str | PurePath, *, algorithm: str = "grpo", **options: Any) -> None:
        super().__init__(model, partial(_build_policy, algorithm=algorithm, options=options, samples=False))


def open_policy(model: str | PurePath, *, algorithm: str = "grpo", **options: Any) -> Policy:
    """Open a model as a policy: an engine and a trainer on one device, for a loop of your own (docs/library.md).

    ``model`` is the folder of a Hugging Face checkpoint or its name on the hub, ``algorithm`` what ``miles.train``
    takes, and ``options`` are the flags of ``miles train`` with underscores. Close it, or use it in a ``with``.

    >>> with miles.open("Qwen/Qwen3-0.6B", lr=1e-6) as policy:                                   # doctest: +SKIP
    ...     samples = policy.score(policy.sample(prompts, n=8), reward)
    ...     policy.forward_backward(samples)
    ...     policy.optim_step()
    ...     policy.publish()
    """
    return Policy(model, algorithm=algorithm, **options)


async def open_policy_async(model: str | PurePath, *, algorithm: str = "grpo", **options: Any) -> Policy:
    """``miles.open`` for a program with an event loop, which goes on while the model is loaded."""
    return await asyncio.to_thread(partial(open_policy, model, algorithm=algorithm, **options))


# -- how they are built -----------------------------------------------------------------------


def _read(command: Literal["open", "chat"], model: str, options: Mapping[str, Any]) -> tuple[Config, Plan]:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "hf_checkpoint" in options:
        raise UsageError("hf_checkpoint is the model, which is given already; remove it.")
    config, plan, _ = read(command, build_argv({"hf_checkpoint": model, **options}))
    set_train_env_vars(config)
    configure_cublas(config.models.numerics)
    return config, plan


async def _build_policy(model: str, *, algorithm: str, options: Mapping[str, Any], samples: bool) -> PolicyParts:
    """The parts of a policy, as a run builds them; without ``samples`` there is no engine."""
    config, plan = _read("open", model, {**list_algorithm_options(algorithm), **options})
    policies = read_policies(config)
    main = policies.main
    owner = replace(main, plan=replace(main.plan, samples=samples, num_steps_per_rollout=1))
    policies = replace(policies, owners={main.policy.name: owner})
    generation = build_generation(config, main.checkpoint)
    estimator = mask_stale_tokens(config, build_advantages(config, policies))
    overlap = config.schedule.max_weight_staleness > 0
    stack = build_stack(
        policies,
        overlap=overlap,
        steps=config.schedule.num_rollout or 1,
        recovery=RecoveryState(checkpoints=CheckpointDirectory(plan.run_dir), rollouts=None, estimator=estimator),
        report=lambda text: None,
        timer=StartTimer(),
    )
    assert stack.local is not None, "a rule requires a policy in this process"
    engine = stack.engines[main.policy.name] if samples else None
    return PolicyParts(
        sampler=Sampler(config, main.checkpoint, generation, engine),
        learner=Learner(config, stack.local, estimator),
        sync=stack.sync if samples else None,
        turns=DeviceTurns(stack.lease, overlap=overlap),
        generation=generation,
        engines=tuple(stack.engines.values()),
        executors=stack.executors,
        shares_weights=plan.transport == "shared",
    )


async def _build_engine(model: str, *, options: Mapping[str, Any]) -> PolicyParts:
    config, _ = _read("chat", model, options)
    checkpoint = read_policy(config)
    generation = build_generation(config, checkpoint)
    engine = await load_engine(config, checkpoint)
    return PolicyParts(
        sampler=Sampler(config, checkpoint, generation, engine),
        learner=None,
        sync=None,
        turns=DeviceTurns(DisjointLease(), overlap=True),
        generation=generation,
        engines=(engine,),
        executors=(),
        shares_weights=False,
    )
