"""Replay of recorded rollouts: groups an earlier run saved, in place of prompts, generation and rewards."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.media import ImageInput
from miles.core.protocols import AdvantageEstimator
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Group, Prompt, Sample
from miles.observe.config import format_step_path
from miles.observe.rollout_reader import StepRollouts, read_step_rollouts, restore_images
from miles.observe.rollouts import compute_sample_digest, step_path
from miles.rollout.offline.torch_dump import LoadFn, is_torch_dump, read_torch_dump

_NAME = re.compile(r"step-(\d{6,})\.parquet")
_MAX_STEPS_AHEAD = 64
"""Steps within which a waiting group is trained on."""
_RECORDED_BY = {
    ROUTED_EXPERTS: "--use-rollout-routing-replay or --save-debug-rollout-data",
    INDEXER_TOPK: "--use-rollout-indexer-replay",
}
"""The flags of a run whose files have what a trainer replays."""


class RolloutRecording:
    """Rollout files by step: of a run directory, of a folder of such files, or of a name pattern with a placeholder.

    Upstream's dumps, which ``load`` reads, count steps from 0; of a reward with parts ``reward_key`` is trained on.
    ``load_image`` gives the pixels of an image by the hash of its file; without it, images are hashes and places.
    """

    def __init__(
        self,
        location: str,
        *,
        load: LoadFn | None = None,
        reward_key: str | None = None,
        load_image: Callable[[str], ImageInput] | None = None,
    ) -> None:
        self.location = location
        folder = Path(location)
        inner = folder / "rollouts"
        self._folder = None if "{" in location else inner if inner.is_dir() else folder
        self._read = lru_cache(maxsize=4)(partial(_read_file, load=load, reward_key=reward_key, load_image=load_image))

    def path(self, step: int) -> Path:
        if self._folder is not None:
            return step_path(self._folder, step)
        return format_step_path(self.location, step - self._offset)

    @cached_property
    def _offset(self) -> int:
        """1 if the steps of a name pattern are counted from 0."""
        first = format_step_path(self.location, 0)
        return 1 if first.is_file() and is_torch_dump(first) else 0

    def missing(self, steps: range) -> int | None:
        """The first of these steps without a file."""
        return next((step for step in steps if not self.path(step).is_file()), None)

    def available_steps(self) -> list[int]:
        """The steps a folder has files for; none are known of a name pattern."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def read(self, step: int) -> StepRollouts:
        return self._read(self.path(step), step)


def _read_file(
    path: Path,
    step: int,
    *,
    load: LoadFn | None,
    reward_key: str | None,
    load_image: Callable[[str], ImageInput] | None,
) -> StepRollouts:
    if load is None or not path.is_file() or not is_torch_dump(path):
        rollouts = read_step_rollouts(path)
        return rollouts if load_image is None else restore_images(rollouts, load_image)
    return read_torch_dump(path, load, step=step, reward_key=reward_key)


class ReplaySource:
    """A core.protocols.Source and Rollout: the prompts of the recorded groups, and each one's group as it was.

    Reads ``steps`` in order, of each the first ``share`` of its groups. A step is rejected if its vocabulary differs,
    if these are not ``num_groups`` of ``num_trajectories`` each, or if it was saved without extras the trainer
    ``needs``.
    """

    def __init__(
        self,
        recording: RolloutRecording,
        *,
        steps: range,
        num_groups: int,
        num_trajectories: int,
        vocabulary: str | None,
        needs: Sequence[str] = (),
        share: float = 1.0,
    ) -> None:
        self._recording = recording
        self._steps = steps
        self._step = steps.start
        self._num_groups = num_groups
        self._num_trajectories = num_trajectories
        self._vocabulary = vocabulary
        self._needs = tuple(needs)
        self._share = share
        self._prompts: deque[Prompt] = deque()
        self._groups_by_prompt: dict[tuple[int, int], deque[Group]] = {}

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._steps) * self._num_groups

    # -- Source: the position follows from the step of the run ------------------------------------

    def next(self) -> Prompt:
        if not self._prompts:
            for group in self.read_checked(self._step).groups:
                self._prompts.append(group.prompt)
                self._groups_by_prompt.setdefault((group.prompt.id, group.prompt.epoch), deque()).append(group)
            self._step += 1
        return self._prompts.popleft()

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore: ``steps`` determines the position."""

    # -- Rollout ----------------------------------------------------------------------------

    async def produce(self, prompt: Prompt) -> Group:
        return self._groups_by_prompt[prompt.id, prompt.epoch].popleft()

    # -- beside the groups ------------------------------------------------------------------

    def probe(self, step: int, advantages: AdvantageEstimator) -> tuple[Sample, ...]:
        """The samples that waited when ``step`` was trained, and were probed; those never trained on are lost."""
        wanted = list(self._recording.read(step).probe)
        found: dict[tuple[int, int, str], Sample] = {}
        for later in range(step + 1, step + 1 + _MAX_STEPS_AHEAD):
            if len(found) == len(wanted) or not self._recording.path(later).is_file():
                break
            for group in self._recording.read(later).groups:
                if any(prompt == group.prompt.id for prompt, _, _ in wanted):
                    found |= {(r.prompt_id, r.trajectory, compute_sample_digest(r)): r for r in advantages(group)}
            found = {key: row for key, row in found.items() if key in wanted}
        return tuple(found[key] for key in wanted if key in found)

    def read_checked(self, step: int) -> StepRollouts:
        """Read a step's groups; DataError where this run cannot train on them."""
        taken = self._recording.read(step)
        taken = replace(taken, groups=taken.groups[: max(1, round(self._share * len(taken.groups)))])
        if self._vocabulary and taken.vocabulary and self._vocabulary != taken.vocabulary:
            raise DataError(
                f"{taken.path} holds tokens of another vocabulary than the tokenizer of --hf-checkpoint has; name the "
                "checkpoint its run was of."
            )
        if len(taken.groups) != self._num_groups:
            raise DataError(
                f"{taken.path} holds {len(taken.groups)} groups, and a step of this run has {self._num_groups}; "
                f"give --rollout-batch-size {len(taken.groups)}, or other files."
            )
        for group in taken.groups:
            if len(group.trajectories) != self._num_trajectories:
                raise DataError(
                    f"{taken.path} holds {len(group.trajectories)} trajectories for prompt {group.prompt.id}, and "
                    f"this run has {self._num_trajectories}; give --n-samples-per-prompt {len(group.trajectories)}, "
                    "or other files."
                )
        if missing_extras := sorted(set(self._needs) & set(taken.excluded_extras)):
            raise DataError(
                f"{taken.path} was written without {missing_extras[0]}, which this run replays; record it "
                f"again with {_RECORDED_BY[missing_extras[0]]}."
            )
        return taken
