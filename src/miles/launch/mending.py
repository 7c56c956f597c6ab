"""A trainer of several ranks that outlives them: when one dies or hangs, all are started again inside the run.

    a rank is lost -> the team is ended, started again -> the newest checkpoint is loaded ->
    the steps since are trained again, on the rollouts they had -> what was asked of the trainer is asked again

What the rollout plane has finished waits meanwhile, and what it has under way goes on: nothing is sampled again, and
the weights are those that an undisturbed run would have.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from miles.cluster.local import Run
from miles.cluster.slow import Slowness
from miles.core import notes
from miles.core.errors import MilesError, TrainerError
from miles.core.protocols import Credit
from miles.core.types import Batch, StepReport, Version
from miles.launch.rank_trainer import TeamTrainer
from miles.models.lora import Adapters
from miles.rollout.recorded import Recording
from miles.schedule.recover import Checkpoints

# Seconds between two looks at whether lost ranks have been replaced, which waits where they were asleep.
_LOOK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a run has kept of its past. Without ``rollouts`` it can only go on from a checkpoint, as another process."""

    checkpoints: Checkpoints
    rollouts: Recording | None
    credit: Credit

    def batch(self, step: int) -> Batch:
        """What ``step`` was trained on; rows that were only looked at are left out."""
        assert self.rollouts is not None
        groups = self.rollouts.read(step).groups
        rows = tuple(row for group in groups for row in self.credit(group))
        return Batch(step=step, samples=rows, num_groups=len(groups))


class MendedTrainer:
    """Implements trainer.Trains with whatever team of so many ranks ``start`` gives, of which there is one at a time.

    ``most`` is how often ranks are started again without a new checkpoint in between; ``tell`` is given a sentence of
    each time, and of a rank that is ``slow`` times as slow as the others. Until it has a ``memory`` nothing is mended.
    """

    def __init__(
        self, start: Callable[[int], TeamTrainer], ranks: int, run: Run, *, most: int, slow: float = 0.0
    ) -> None:
        self._start, self._ranks, self._run, self._most = start, ranks, run, most
        self.memory: Memory | None = None
        self.tell: Callable[[str], None] = lambda sentence: None
        self._team = start(ranks)
        # Publications come from another thread than steps.
        self._turn = threading.RLock()
        self._base: Path | None = None
        self._before: int | None = None
        self._last: Batch | None = None
        self._version: Version | None = None
        self._asleep = False
        self._mended_at, self._times = -1, 0
        self._slowness = Slowness(slow)

    async def step(self, batch: Batch) -> StepReport:
        return await self._run(lambda: self._do("step", batch))

    async def save(self, folder: Path) -> None:
        failure = await self._run(lambda: self._do("save", folder))
        if failure is not None:
            raise failure

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self._do("load", folder))

    async def sleep(self) -> None:
        await self._run(lambda: self._do("sleep"))

    async def wake(self) -> None:
        await self._run(lambda: self._do("wake"))

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, put together anew: whoever takes them may keep them."""
        return self._do("weights", None, own=True)

    def adapters(self) -> Adapters | None:
        """The factors that are trained in place of the weights, if they are."""
        return self._team.adapters()

    async def lost(self) -> None:
        """Replace ranks as soon as one ends, also while nothing is asked of them; raises when that is of no use."""
        while True:
            team = self._team
            watching = asyncio.create_task(team.lost())
            try:
                while self._team is team and not watching.done():  # others may have taken its place
                    await asyncio.wait((watching,), timeout=_LOOK)
                if watching.done():
                    with suppress(TrainerError):
                        await watching
                    await self._run(self._mend_unasked)
            finally:
                watching.cancel()
            while self._team is team:
                await asyncio.sleep(_LOOK)

    async def resize(self, ranks: int, folder: Path) -> None:
        """Go on with so many ranks, from the state there is, which is handed over in ``folder``.

        Where they cannot be had, that is raised, and there are as many as before.
        """
        await self._run(lambda: self._resize(ranks, folder))

    def close(self) -> None:
        """End all ranks; none is left when this returns."""
        self._team.close()

    def _resize(self, ranks: int, folder: Path) -> None:
        with self._turn:
            if (failure := self._do("save", folder)) is not None:
                raise failure
            notes.outcome(folder)
            notes.clear(folder)
            self._team.close()
            _clear()
            try:
                self._team, self._ranks = self._loaded(ranks, folder), ranks
            except TrainerError:
                _clear()
                self._team = self._loaded(self._ranks, folder)
                raise

    def _loaded(self, ranks: int, folder: Path) -> TeamTrainer:
        team = self._start(ranks)
        try:
            team.together("load", folder)
        except TrainerError:
            team.close()
            raise
        return team

    # -- doing ------------------------------------------------------------------------------

    def _do(self, verb: str, content: Any = None, *, own: Any = None) -> Any:
        with self._turn:
            while True:
                try:
                    found = self._team.together(verb, content, own=own)
                    break
                except TrainerError as error:
                    self._mend(error)
                    if verb == "wake":  # new ranks are awake
                        found = None
                        break
                    if verb == "save":
                        _empty(content)
            self._remember(verb, content, found)
            return self._compared(content.step, found) if isinstance(found, StepReport) else found

    def _compared(self, step: int, report: StepReport) -> StepReport:
        """The report, with how the ranks' own work compares; a rank that stays behind is named."""
        paces = self._team.paces
        if len(paces) < 2:
            return report
        for slow in self._slowness.look(step, paces):
            self.tell(slow.said("step"))
        read = {"own_per_token_median": median(paces.values()), "slowest_rank": self._slowness.most}
        return replace(report, seconds={**report.seconds, **read})

    def _remember(self, verb: str, content: Any, found: Any) -> None:
        if verb == "load":
            self._base = content
        elif verb == "step":
            self._before = content.step - 1 if self._before is None else self._before
            self._last, self._version = content, found.version
        elif verb in ("sleep", "wake"):
            self._asleep = verb == "sleep"

    # -- mending ----------------------------------------------------------------------------

    def _mend_unasked(self) -> None:
        with self._turn:
            if self._asleep:  # their device is the engine's now
                return
            try:
                self._team.team.check()
            except TrainerError as error:
                self._mend(error)

    def _mend(self, error: TrainerError) -> None:
        """Start all ranks again and bring them to where they were; raises where that cannot be."""
        while True:
            folder, step = self._newest(error)
            self._count(step, error)
            self.tell(self._said(folder, step))
            self._team.close()
            _clear()
            try:
                self._team = self._start(self._ranks)
                self._catch_up(folder, step)
                return
            except TrainerError as again:
                error = again

    def _newest(self, error: TrainerError) -> tuple[Path | None, int]:
        """The checkpoint to go on from, None for the first weights, and the steps behind it."""
        memory = self.memory
        if memory is None or not self._team.team.gone:
            raise error
        newest = memory.checkpoints.latest()
        if newest is None:
            folder, step = self._base, self._before or 0
        else:
            folder, step = newest[0], newest[1].step
        missing = [number for number in range(step + 1, self._done()) if not _there(memory, number)]
        if missing:
            why = f"the rollouts of step {missing[0]}, without which it cannot be trained again, were not kept"
            mend = "leave out --disable-save-rollouts, or have the run continued from its checkpoint by --max-restarts"
            raise TrainerError(f"{error}; its ranks were not started again inside the run, because {why}; {mend}")
        return folder, step

    def _done(self) -> int:
        return 0 if self._last is None else self._last.step

    def _count(self, step: int, error: TrainerError) -> None:
        self._times = self._times + 1 if step == self._mended_at else 1
        self._mended_at = step
        if self._times > self._most:
            tries = f"; that was after {self._most} restarts without a new checkpoint" if self._most else ""
            raise TrainerError(f"{error}{tries} (--trainer-max-restarts)") from error

    def _said(self, folder: Path | None, step: int) -> str:
        steps = range(step + 1, self._done() + 1)
        again = f", and steps {steps[0]} to {steps[-1]} are trained again on their rollouts" if steps else ""
        if len(steps) == 1:
            again = f", and step {steps[0]} is trained again on its rollouts"
        start = "the first weights" if folder is None else folder.name
        times = f"{self._times} of at most {self._most} times"
        return f"{self._team.team.cause}; the trainer's ranks are started again from {start}{again} ({times})."

    def _catch_up(self, folder: Path | None, step: int) -> None:
        if folder is not None:
            self._team.together("load", folder)
        version = None
        for number in range(step + 1, self._done() + 1):
            assert self.memory is not None
            last = self._last if self._last is not None and self._last.step == number else None
            version = self._team.together("step", last or self.memory.batch(number)).version
        if version is not None and version != self._version:
            raise MilesError(f"the trainer came back with version {version.number}, and not {self._version}")


def _clear() -> None:
    """Give back what ranks that are gone had here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _there(memory: Memory, step: int) -> bool:
    return memory.rollouts is not None and memory.rollouts.path(step).is_file()


def _empty(folder: Path) -> None:
    """Remove what was begun in it."""
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
