"""Fault-tolerant distributed trainer: when a rank dies or hangs, all ranks are restarted within the run.

    a rank is lost -> the ranks are stopped and started again -> the newest checkpoint is loaded ->
    the steps since are trained again on their saved rollouts -> the interrupted command is repeated

Finished groups wait meanwhile and generation continues: nothing is sampled again, and the weights are those of a run
without the failure.
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

from miles.algo.advantages import limit_staleness
from miles.cluster.executor import Executor
from miles.cluster.straggler import StragglerDetector
from miles.core import markers
from miles.core.errors import MilesError, TrainerError
from miles.core.protocols import AdvantageEstimator
from miles.core.types import Batch, Sample, StepReport, Version
from miles.launch.distributed.driver import DistributedTrainer
from miles.models.lora.adapters import LoraAdapters
from miles.rollout.offline.replay_source import RolloutRecording
from miles.schedule.checkpoints import CheckpointDirectory

# Seconds between two checks whether lost ranks were replaced, which waits while the trainer sleeps.
_POLL_INTERVAL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryState:
    """What a trainer recovers from. Without ``rollouts`` a run can only resume as a new process.

    A ``policy`` of several is trained at every ``every``-th step of the run, on its samples of these steps, and its
    part of a checkpoint is in ``subfolder``. With ``max_staleness``, tokens staler than that were not trained on.
    """

    checkpoints: CheckpointDirectory
    rollouts: RolloutRecording | None
    estimator: AdvantageEstimator
    policy: str | None = None
    every: int = 1
    subfolder: str = ""
    max_staleness: int | None = None

    def read_batch(self, step: int, version: int) -> Batch:
        """The batch of ``step``, which trained the weights of ``version``; without probe samples."""
        assert self.rollouts is not None
        samples: list[Sample] = []
        count = 0
        for number in self._list_rollouts(step):
            groups = self.rollouts.read(number).groups
            samples += [s for g in groups for s in self.estimator(g) if self.policy in (None, s.policy)]
            count += len(groups)
        if self.max_staleness is not None:
            samples = limit_staleness(samples, lambda _: version, self.max_staleness)
        return Batch(step=step, samples=tuple(samples), num_groups=count)

    @property
    def whose(self) -> str:
        """Whose ranks are restarted, for a message."""
        return f"policy {self.policy}'s" if self.subfolder else "the trainer's"

    def list_steps(self, after: int, last: int) -> list[int]:
        """The steps in which the policy was trained, ``after`` one up to the ``last``."""
        return [step for step in range(after + 1, last + 1) if step % self.every == 0]

    def has_rollouts(self, step: int) -> bool:
        """Whether the batch of ``step`` can be read."""
        rollouts = self.rollouts
        return rollouts is not None and all(rollouts.path(n).is_file() for n in self._list_rollouts(step))

    def find_checkpoint(self) -> tuple[Path, int] | None:
        """The policy's part of the newest checkpoint, and its step."""
        newest = self.checkpoints.latest()
        return None if newest is None else (newest[0] / self.subfolder, newest[1].step)

    def _list_rollouts(self, step: int) -> range:
        return range(step - self.every + 1, step + 1)


class ResilientTrainer:
    """A PublishingTrainer on the distributed trainer that ``start`` starts with a number of ranks.

    ``max_restarts`` limits restarts without a new checkpoint in between. ``report`` is called for each restart, and for
    ranks that take ``slow_factor`` times the median of the others.
    """

    def __init__(
        self,
        start: Callable[[int], DistributedTrainer],
        ranks: int,
        run: Executor,
        *,
        max_restarts: int,
        slow_factor: float,
        recovery: RecoveryState,
        report: Callable[[str], None],
        version: Version | None = None,
    ) -> None:
        self._start = start
        self._ranks = ranks
        self._run = run
        self._max_restarts = max_restarts
        self._recovery = recovery
        self._stragglers = StragglerDetector(slow_factor)
        self.report = report
        self._trainer = start(ranks)
        self._lock = threading.RLock()  # weights are published from another thread than steps
        self._loaded_folder: Path | None = None
        self._steps_before: int | None = None
        self._last_batch: Batch | None = None
        self._version = version or Version()
        self._asleep = False
        self._restarted_at = -1
        self._num_restarts = 0

    async def step(self, batch: Batch) -> StepReport:
        return await self._run(lambda: self._run_command("step", batch))

    async def save(self, folder: Path) -> None:
        failure = await self._run(lambda: self._run_command("save", folder))
        if failure is not None:
            raise failure

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self._run_command("load", folder))

    async def sleep(self) -> None:
        await self._run(lambda: self._run_command("sleep"))

    async def wake(self) -> None:
        await self._run(lambda: self._run_command("wake"))

    @property
    def version(self) -> Version:
        """The version of the weights."""
        return self._version

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, gathered into new tensors that the caller may keep."""
        return self._run_command("weights", None, own_content=True)

    def adapters(self) -> LoraAdapters | None:
        """The LoRA adapters, if they are trained."""
        return self._trainer.adapters()

    def draft_weights(self) -> Mapping[str, Tensor] | None:
        """Copies of the draft model's weights, if one is trained."""
        with self._lock:
            return self._trainer.draft_weights()

    async def watch_ranks(self) -> None:
        """Restart ranks as soon as one ends, also while they are idle; raises when that is not possible."""
        while True:
            trainer = self._trainer
            loss = asyncio.create_task(trainer.wait_for_loss())
            try:
                while self._trainer is trainer and not loss.done():  # a command may have restarted them
                    await asyncio.wait((loss,), timeout=_POLL_INTERVAL)
                if loss.done():
                    with suppress(TrainerError):
                        await loss
                    await self._run(self._recover_if_failed)
            finally:
                loss.cancel()
            while self._trainer is trainer:
                await asyncio.sleep(_POLL_INTERVAL)

    async def resize(self, ranks: int, folder: Path) -> None:
        """Continue with another number of ranks, handing the state over in ``folder``.

        Raises where they cannot be started; the number of ranks is then as before.
        """
        await self._run(lambda: self._resize(ranks, folder))

    def close(self) -> None:
        """Stop all ranks; none is left when this returns."""
        self._trainer.close()

    def _resize(self, ranks: int, folder: Path) -> None:
        with self._lock:
            if (failure := self._run_command("save", folder)) is not None:
                raise failure
            markers.collect_files(folder)
            markers.clear_markers(folder)
            self._trainer.close()
            _free_memory()
            try:
                self._trainer = self._start_from(ranks, folder)
                self._ranks = ranks
            except TrainerError:
                _free_memory()
                self._trainer = self._start_from(self._ranks, folder)
                raise

    def _start_from(self, ranks: int, folder: Path) -> DistributedTrainer:
        trainer = self._start(ranks)
        try:
            trainer.run_all("load", folder)
        except TrainerError:
            trainer.close()
            raise
        return trainer

    # -- commands ---------------------------------------------------------------------------

    def _run_command(self, command: str, content: Any = None, *, own_content: Any = None) -> Any:
        with self._lock:
            while True:
                try:
                    result = self._trainer.run_all(command, content, own_content=own_content)
                    break
                except TrainerError as error:
                    self._recover(error)
                    if command == "wake":  # new ranks are awake
                        result = None
                        break
                    if command == "save":
                        _clear_folder(content)
            self._record(command, content, result)
            return self._add_straggler_metrics(content.step, result) if isinstance(result, StepReport) else result

    def _add_straggler_metrics(self, step: int, report: StepReport) -> StepReport:
        """The report with how the ranks' own times compare; stragglers are reported."""
        seconds = self._trainer.seconds_per_token
        if len(seconds) < 2:
            return report
        for straggler in self._stragglers.update(step, seconds):
            self.report(straggler.describe("step"))
        metrics = {"compute_per_token_median": median(seconds.values()), "straggler_ratio": self._stragglers.max_ratio}
        return replace(report, seconds={**report.seconds, **metrics})

    def _record(self, command: str, content: Any, result: Any) -> None:
        if command == "load":
            self._loaded_folder = content
            self._version = result
        elif command == "step":
            if self._steps_before is None:
                self._steps_before = content.step - 1
            self._last_batch = content
            self._version = result.version
        elif command in ("sleep", "wake"):
            self._asleep = command == "sleep"

    # -- recovery ---------------------------------------------------------------------------

    def _recover_if_failed(self) -> None:
        with self._lock:
            if self._asleep:  # the engine uses the device now
                return
            try:
                self._trainer.group.raise_if_failed()
            except TrainerError as error:
                self._recover(error)

    def _recover(self, error: TrainerError) -> None:
        """Restart all ranks and bring them to where they were; raises where that is not possible."""
        while True:
            folder, step = self._find_restart_point(error)
            self._count_restart(step, error)
            self.report(self._describe_restart(folder, step))
            self._trainer.close()
            _free_memory()
            try:
                self._trainer = self._start(self._ranks)
                self._catch_up(folder, step)
                return
            except TrainerError as again:
                error = again

    def _find_restart_point(self, error: TrainerError) -> tuple[Path | None, int]:
        """The checkpoint to restart from, None for the initial weights, and its step."""
        if not self._trainer.group.rank_died:
            raise error
        newest = self._recovery.find_checkpoint()
        if newest is None:
            folder, step = self._loaded_folder, self._steps_before or 0
        else:
            folder, step = newest
        earlier = self._recovery.list_steps(step, self._last_step - 1)
        missing = [number for number in earlier if not self._recovery.has_rollouts(number)]
        if missing:
            raise TrainerError(
                f"{error}; its ranks were not restarted within the run, because the rollouts of step {missing[0]} were "
                "not saved; remove --disable-save-rollouts, or resume from the checkpoint with --max-restarts"
            )
        return folder, step

    @property
    def _last_step(self) -> int:
        return 0 if self._last_batch is None else self._last_batch.step

    def _count_restart(self, step: int, error: TrainerError) -> None:
        self._num_restarts = self._num_restarts + 1 if step == self._restarted_at else 1
        self._restarted_at = step
        if self._num_restarts > self._max_restarts:
            most = self._max_restarts
            tries = f"; that was after {most} restarts without a new checkpoint" if most else ""
            raise TrainerError(f"{error}{tries} (--trainer-max-restarts)") from error

    def _describe_restart(self, folder: Path | None, step: int) -> str:
        steps = self._recovery.list_steps(step, self._last_step)
        again = f", and steps {steps[0]} to {steps[-1]} are trained again on their rollouts" if steps else ""
        if len(steps) == 1:
            again = f", and step {steps[0]} is trained again on its rollouts"
        start = "the initial weights" if folder is None else self._name_checkpoint(folder)
        count = f"restart {self._num_restarts} of at most {self._max_restarts}"
        return f"{self._trainer.group.cause}; {self._recovery.whose} ranks are restarted from {start}{again} ({count})."

    def _name_checkpoint(self, folder: Path) -> str:
        depth = len(Path(self._recovery.subfolder).parts)
        return "/".join(folder.parts[-1 - depth :])

    def _catch_up(self, folder: Path | None, step: int) -> None:
        current = 0 if folder is None else self._trainer.run_all("load", folder).number
        version = None
        for number in self._recovery.list_steps(step, self._last_step):
            last = self._last_batch if self._last_batch is not None and self._last_batch.step == number else None
            version = self._trainer.run_all("step", last or self._recovery.read_batch(number, current)).version
            current = version.number
        if version is not None and version != self._version:
            raise MilesError(f"the restarted trainer has version {version.number}, not {self._version}")


def _free_memory() -> None:
    """Free what stopped ranks had in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _clear_folder(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
