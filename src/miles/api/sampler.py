"""The sampling half of a policy: prompts in, samples with tokens, log-probs and text out, and their scores.

A prompt that is sampled again gets other seeds: its epoch counts how often it was sampled, as in a run.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from miles.api.functions import adapt_reward, to_reward
from miles.api.records import Data, RecordIndex, list_columns, list_rows, storing_rows
from miles.api.samples import RECORD, PolicySample, group_samples, list_samples
from miles.core.errors import UsageError, first_cause
from miles.core.protocols import Engine, GroupRewardFn, RewardFn, SamplingParams
from miles.core.types import UNSCORED, Author, Group, Prompt, Trajectory
from miles.hooks.import_path import is_path
from miles.hooks.offload import offload_function
from miles.launch.build.generation import Generation
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.prompts import build_offline_rollout
from miles.launch.build.rewards import build_offloaded_rewards
from miles.launch.build.run import read_training_data
from miles.launch.config import Config
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.reward.registry import check_rm_type
from miles.rollout.sampling import build_training_sampling
from miles.rollout.seeds import hash_text, make_training_seed_fn

PromptLike = str | Prompt | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text, a prompt, a row of data, or chat messages."""
RewardLike = Callable[..., Any] | str | Sequence[float]
"""A function, the name of a reward or the address of one, or one number for each sample."""

_SAMPLING = tuple(f.name for f in fields(SamplingParams) if f.name != "num_prior_tokens")


class Sampler:
    """Reads prompts, samples from ``engine`` and scores; without an engine it reads data and scores."""

    def __init__(
        self, config: Config, checkpoint: PolicyCheckpoint, generation: Generation, engine: Engine | None
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._generation = generation
        self._engine = engine
        self._counts: Counter[int] = Counter()

    def state(self) -> dict[str, Any]:
        """How often each prompt was sampled, as JSON."""
        return {"sampled": [[prompt_id, count] for prompt_id, count in sorted(self._counts.items())]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._counts = Counter({int(prompt_id): int(count) for prompt_id, count in state.get("sampled", ())})

    def read_prompts(self, data: Data) -> list[Prompt]:
        """The prompts of ``data`` as a run reads them, each with its row under ``metadata["record"]``."""
        if isinstance(data, str | PurePath):
            return self._read_entry(str(data), RecordIndex(None, [str(data)]))
        rows = list_rows(data, self._config.rollout.input_key, None)
        with (
            tempfile.TemporaryDirectory() as folder,
            storing_rows(rows, Path(folder), list_columns(self._config)) as path,
        ):
            return self._read_entry(str(path), RecordIndex(rows))

    async def read_demonstrations(self, data: Data) -> list[PolicySample]:
        """The demonstrations of ``data`` (pairs of responses for a preference loss) as samples to train on."""
        rollout = build_offline_rollout(self._config, self._checkpoint.tokenizer, self._checkpoint.spec.eos_token_ids)
        groups = [await rollout.produce(prompt) for prompt in self.read_prompts(data)]
        return [replace(sample, trajectory=self._add_text(sample.trajectory)) for sample in list_samples(groups)]

    async def sample(
        self, prompts: PromptLike | Sequence[PromptLike], n: int, sampling: Mapping[str, Any]
    ) -> list[PolicySample]:
        assert self._engine is not None, "this policy samples"
        params = self._build_sampling(sampling)
        seed = self._config.rollout.rollout_seed if sampling.get("seed") is None else int(sampling["seed"])
        listed = self._list_prompts(prompts, counts=sampling.get("seed") is None)
        r = self._config.rollout
        rollout = GroupRollout(
            engine=self._engine,
            generate=self._generation.generate,
            sampling=params,
            group_size=n,
            seed_fn=make_training_seed_fn(seed),
            max_reward_failures=r.max_reward_failures,
            allow_duplicates=r.allow_duplicate_samples,
            scores=False,
        )
        return list_samples(await _gather([partial(rollout.produce, prompt) for prompt in listed]))

    async def score(self, samples: Sequence[PolicySample], reward: RewardLike | None) -> list[PolicySample]:
        """The samples with the rewards of ``reward``, by default that of the options."""
        if isinstance(reward, Sequence) and not isinstance(reward, str):
            if len(reward) != len(samples):
                raise UsageError(f"score() has {len(reward)} rewards for {len(samples)} samples; give one for each.")
            pairs = zip(samples, reward, strict=True)
            return [_clear_reward(sample).with_reward(to_reward(value)) for sample, value in pairs]
        one, group = self._build_reward(reward)
        if one is None and group is None:
            raise UsageError("score() has no reward; give a function or a name, or open the policy with rm_type.")
        r = self._config.rollout
        scorer = GroupRollout(
            engine=_NoEngine(),
            generate=self._generation.generate,
            sampling=build_training_sampling(r),
            group_size=1,
            seed_fn=make_training_seed_fn(r.rollout_seed),
            reward=one,
            group_reward=group,
            reward_key=self._generation.reward_key,
            reward_name="the reward",
            reward_seconds=r.reward_timeout,
            max_reward_failures=r.max_reward_failures,
        )
        groups = group_samples([_clear_reward(sample) for sample in samples])
        return list_samples(await _gather([partial(scorer.score, group) for group in groups]))

    def _read_entry(self, entry: str, find_record: RecordIndex) -> list[Prompt]:
        config = replace(self._config, rollout=replace(self._config.rollout, prompt_data=(entry,)))
        parts = read_training_data(config, self._checkpoint, self._generation)
        prompts = (prompt for part in parts for prompt in part.dataset.prompts)
        return [replace(p, metadata={**p.metadata, RECORD: find_record(p)}) for p in prompts]

    def _build_reward(self, reward: RewardLike | None) -> tuple[RewardFn | None, GroupRewardFn | None]:
        generation, worker = self._generation, self._generation.hook_worker
        if reward is None:
            return generation.reward, generation.group_reward
        if isinstance(reward, str):
            custom = is_path(reward)
            if not custom:
                check_rm_type(reward)
            path, rm_type = (reward, None) if custom else (None, reward)
            rollout = replace(self._config.rollout, custom_rm_path=path, rm_type=rm_type)
            config = replace(self._config, rollout=rollout)
            return build_offloaded_rewards(config, worker)
        assert callable(reward), "a sequence of rewards was handled before"
        adapted = adapt_reward(reward, lambda prompt: prompt.metadata.get(RECORD, {}))
        return offload_function(worker, adapted, "The reward function"), None

    def _build_sampling(self, sampling: Mapping[str, Any]) -> SamplingParams:
        unknown = [name for name in sampling if name not in _SAMPLING]
        if unknown:
            raise UsageError(f"sample() takes no {unknown[0]}; its options are {', '.join(_SAMPLING)}.")
        given = {name: value for name, value in sampling.items() if name != "seed"}
        for name in ("stop", "stop_token_ids"):
            if name in given:
                given[name] = (given[name],) if isinstance(given[name], str | int) else tuple(given[name])
        return replace(build_training_sampling(self._config.rollout), **given)

    def _list_prompts(self, prompts: PromptLike | Sequence[PromptLike], *, counts: bool) -> list[Prompt]:
        """Each prompt, whose epoch says how often it was sampled before if that ``counts``."""
        if isinstance(prompts, str | Prompt | Mapping) or _is_conversation(prompts):
            listed = [self._to_prompt(prompts)]
        else:
            listed = [self._to_prompt(prompt) for prompt in prompts]
        if not listed:
            raise UsageError("sample() has no prompts; give at least one.")
        if not counts:
            return listed
        result: list[Prompt] = []
        for prompt in listed:
            result.append(replace(prompt, epoch=self._counts[prompt.id]))
            self._counts[prompt.id] += 1
        return result

    def _to_prompt(self, prompt: Any) -> Prompt:
        """A prompt; one that is none yet gets an id by its content."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            made = Prompt(id=0, messages=({"role": "user", "content": prompt},))
        elif isinstance(prompt, Mapping):
            (made,) = self.read_prompts([prompt])
        elif _is_conversation(prompt):
            made = Prompt(id=0, messages=tuple(prompt))
        else:
            kind = type(prompt).__name__
            raise UsageError(
                f"sample() was given a {kind} as a prompt; give a text, messages, a row or a miles.Prompt."
            )
        content = json.dumps([list(made.messages), made.label], sort_keys=True, default=str)
        return replace(made, id=hash_text(content) >> 2)

    def _add_text(self, trajectory: Trajectory) -> Trajectory:
        ids = [int(i) for span in trajectory.branches[0] if span.author is Author.POLICY for i in span.tokens]
        return replace(trajectory, metadata={**trajectory.metadata, "text": self._checkpoint.tokenizer.text(ids)})


class _NoEngine:
    """An Engine for what only scores."""

    async def generate(self, *args: object, **kwargs: object) -> Any:
        raise AssertionError("scoring generates nothing")


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def _clear_reward(sample: PolicySample) -> PolicySample:
    """The sample as it was before it was scored."""
    metadata = {name: value for name, value in sample.trajectory.metadata.items() if name != UNSCORED}
    return replace(sample, trajectory=replace(sample.trajectory, reward=None, metadata=metadata))


async def _gather(works: Sequence[Callable[[], Any]]) -> list[Group]:
    """The results of all works, started in order; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work()) for work in works]
    except BaseExceptionGroup as errors:
        first = first_cause(errors)
        raise first from first.__cause__
    return [task.result() for task in running]
