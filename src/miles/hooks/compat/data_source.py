"""Upstream's data sources: a base class over the run's prompts, and the source that a rollout function reads."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from miles.core.errors import HookError
from miles.core.types import Prompt
from miles.hooks.compat.types import UpstreamContext, UpstreamSample

SampleGroup = list[UpstreamSample]
_PROMPTS: ContextVar[tuple[UpstreamContext, Sequence[Prompt]] | None] = ContextVar("data_source_prompts", default=None)


@contextmanager
def provide_prompts(run: UpstreamContext, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Have data sources that are constructed in this context read ``prompts``."""
    token = _PROMPTS.set((run, prompts))
    try:
        yield
    finally:
        _PROMPTS.reset(token)


class BaseDataSource(ABC):
    """What a data source is to a rollout function. A run saves how many prompts were read, and reads as many again."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next groups of samples, each of one prompt."""

    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Take back groups, to be returned first."""
        raise NotImplementedError(f"{type(self).__name__} takes no samples back")

    def save(self, rollout_id: int) -> None:  # noqa: B027
        """Save its state; a run does not call it."""

    def load(self, rollout_id: int | None = None) -> None:  # noqa: B027
        """Load its state; a run does not call it."""

    def get_buffer_length(self) -> int | None:
        """The number of groups that were taken back; None where there can be none."""
        return None


class PromptDataset:
    """The prompts of --prompt-data as samples."""

    def __init__(self, samples: Sequence[UpstreamSample], seed: int) -> None:
        self.origin_samples = list(samples)
        self.samples = list(samples)
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """The order of an epoch."""
        self.samples = list(self.origin_samples)
        random.Random(f"{self.seed} {new_epoch_id}").shuffle(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> UpstreamSample:
        return self.samples[index]


class RolloutDataSource(BaseDataSource):
    """The prompts of --prompt-data, epoch after epoch; to be subclassed under --data-source-path."""

    def __init__(self, args: Any) -> None:
        found = _PROMPTS.get()
        if found is None:
            raise HookError("RolloutDataSource reads the prompts of a run: name its subclass with --data-source-path.")
        run, prompts = found
        self.args = args
        self.dataset = PromptDataset([_sample_from_prompt(run, prompt) for prompt in prompts], args.rollout_seed)
        self.metadata: dict[str, Any] = {}
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        if args.rollout_shuffle:
            self.dataset.shuffle(0)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        if not len(self.dataset):
            raise HookError("The data source has no prompts; name some with --prompt-data.")
        return [self._next_group() for _ in range(num_samples)]

    def _next_group(self) -> SampleGroup:
        if self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
        count = self.args.n_samples_per_prompt
        group = make_group(self.dataset.samples[self.sample_offset], self.sample_group_index, count)
        self.sample_offset += 1
        self.sample_group_index += 1
        self.sample_index += count
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, with a buffer of groups that were taken back, which are returned first."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[SampleGroup] = []
        self.buffer_filter: Callable[..., list[SampleGroup]] = pop_first

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        taken = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer else []
        return taken + super().get_samples(num_samples - len(taken))

    def add_samples(self, samples: list[SampleGroup]) -> None:
        self.buffer += samples

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep what a function notes."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What was noted."""
        return self.metadata


class RolloutFnSource(BaseDataSource):
    """What a rollout function reads: the prompts that the run wants groups of, then further ones of its source.

    ``prompts`` maps the ``group_index`` of what was handed out to its prompt.
    """

    def __init__(self, run: UpstreamContext) -> None:
        self._run = run
        self._wanted: deque[Prompt] = deque()
        self._buffer: list[SampleGroup] = []
        self._count = 0
        self.next_prompt: Callable[[], Prompt] | None = None
        self.prompts: dict[int, Prompt] = {}
        self.metadata: dict[str, Any] = {}

    def want(self, prompt: Prompt) -> None:
        """Add a prompt that the run wants a group of."""
        self._wanted.append(prompt)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        taken, self._buffer = self._buffer[:num_samples], self._buffer[num_samples:]
        return taken + [self._make_group() for _ in range(num_samples - len(taken))]

    def add_samples(self, samples: list[SampleGroup]) -> None:
        self._buffer += samples

    def get_buffer_length(self) -> int:
        return len(self._buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep what a function notes."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What was noted."""
        return self.metadata

    def _make_group(self) -> SampleGroup:
        if self._wanted:
            prompt = self._wanted.popleft()
        elif self.next_prompt is not None:
            prompt = self.next_prompt()
        else:
            raise HookError("The data source of an evaluation has no prompts; read those of the held-out sets.")
        number, self._count = self._count, self._count + 1
        self.prompts[number] = prompt
        return make_group(_sample_from_prompt(self._run, prompt), number, self._run.args.n_samples_per_prompt)


def pop_first(args: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """The buffer filter that takes the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def make_group(sample: UpstreamSample, number: int, count: int) -> SampleGroup:
    """``count`` samples of one prompt."""
    group = [deepcopy(sample) for _ in range(count)]
    for index, each in enumerate(group):
        each.group_index, each.index = number, number * count + index
    return group


def _sample_from_prompt(run: UpstreamContext, prompt: Prompt) -> UpstreamSample:
    return UpstreamSample(prompt=run.prompt_text(prompt), label=prompt.label, metadata=dict(prompt.metadata))
