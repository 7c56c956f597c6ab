"""Groups that an earlier run wrote down, in place of a source of prompts and of all that answers and scores them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.protocols import Credit
from miles.core.types import Group, Prompt, Sample
from miles.observe.naming import named
from miles.observe.reread import Taken, read_taken
from miles.observe.rollouts import digest_of, step_path

_NAME = re.compile(r"step-(\d{6,})\.parquet")
_AHEAD = 64
"""Steps within which a group that waits is taken."""


class Recording:
    """The files of a run, by step: in its directory, in a folder of files so called, or as a name with a blank says."""

    def __init__(self, word: str) -> None:
        self.word = word
        folder = Path(word)
        inner = folder / "rollouts"
        self._folder = None if "{" in word else inner if inner.is_dir() else folder
        self._read = lru_cache(maxsize=4)(read_taken)

    def path(self, step: int) -> Path:
        return named(self.word, step) if self._folder is None else step_path(self._folder, step)

    def missing(self, steps: range) -> int | None:
        """The first of these steps that is not there."""
        return next((step for step in steps if not self.path(step).is_file()), None)

    def there(self) -> list[int]:
        """The steps of a folder that are there; none are known of a name with a blank."""
        if self._folder is None or not self._folder.is_dir():
            return []
        return sorted(int(found[1]) for path in self._folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def read(self, step: int) -> Taken:
        return self._read(self.path(step))


class Recorded:
    """A core.protocols.Source and Rollout: the prompts of the recorded groups, and each one's group as it was.

    Goes through ``steps``. A step of another vocabulary, or that has not ``groups`` of ``attempts``, is refused, and
    so is one that was written without extras the trainer ``needs``.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        steps: range,
        groups: int,
        attempts: int,
        vocabulary: str | None,
        needs: Sequence[str] = (),
    ) -> None:
        self._recording, self._steps, self._step = recording, steps, steps.start
        self._groups, self._attempts = groups, attempts
        self._vocabulary, self._needs = vocabulary, tuple(needs)
        self._prompts: deque[Prompt] = deque()
        self._made: dict[tuple[int, int], deque[Group]] = {}

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._steps) * self._groups

    # -- Source: where it stands follows from the step the run stands at --------------------

    def next(self) -> Prompt:
        if not self._prompts:
            for group in self.checked(self._step).groups:
                self._prompts.append(group.prompt)
                self._made.setdefault((group.prompt.id, group.prompt.epoch), deque()).append(group)
            self._step += 1
        return self._prompts.popleft()

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back: ``steps`` say it all."""

    # -- Rollout ----------------------------------------------------------------------------

    async def produce(self, prompt: Prompt) -> Group:
        return self._made[prompt.id, prompt.epoch].popleft()

    # -- beside the groups ------------------------------------------------------------------

    def probe(self, step: int, credit: Credit) -> tuple[Sample, ...]:
        """The rows that waited when ``step`` was trained, and were looked at; those that were never taken are lost."""
        wanted = list(self._recording.read(step).probe)
        found: dict[tuple[int, int, str], Sample] = {}
        for later in range(step + 1, step + 1 + _AHEAD):
            if len(found) == len(wanted) or not self._recording.path(later).is_file():
                break
            for group in self._recording.read(later).groups:
                if any(prompt == group.prompt.id for prompt, _, _ in wanted):
                    found |= {(r.prompt_id, r.trajectory, digest_of(r)): r for r in credit(group)}
            found = {key: row for key, row in found.items() if key in wanted}
        return tuple(found[key] for key in wanted if key in found)

    def checked(self, step: int) -> Taken:
        """A step's groups, refused where this run cannot train on them."""
        taken = self._recording.read(step)
        if self._vocabulary and taken.vocabulary and self._vocabulary != taken.vocabulary:
            raise DataError(
                f"{taken.path} holds tokens of another vocabulary than the tokenizer of --hf-checkpoint has; name the "
                "checkpoint its run was of."
            )
        if len(taken.groups) != self._groups:
            raise DataError(
                f"{taken.path} holds {len(taken.groups)} groups, and a step of this run has {self._groups}; give "
                f"--rollout-batch-size {len(taken.groups)}, or other files."
            )
        for group in taken.groups:
            if len(group.trajectories) != self._attempts:
                raise DataError(
                    f"{taken.path} holds {len(group.trajectories)} attempts at prompt {group.prompt.id}, and this run "
                    f"has {self._attempts}; give --n-samples-per-prompt {len(group.trajectories)}, or other files."
                )
        if gone := sorted(set(self._needs) & set(taken.without)):
            raise DataError(
                f"{taken.path} was written without {gone[0]}, which this run replays; make it again by a run with "
                "--use-rollout-routing-replay or --save-debug-rollout-data."
            )
        return taken
