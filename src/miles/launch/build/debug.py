"""Debug runs: saved and replayed rollouts, training without sampling, and sampling without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event
from miles.core.media import ImageInput
from miles.core.protocols import AdvantageEstimator, ImageTokenizer, Tokenizer, Trainer
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Batch, StepReport, Version
from miles.launch.config import Config
from miles.launch.plan.plan import Plan
from miles.models.base import CausalLM
from miles.models.tokenizer import fingerprint_vocabulary
from miles.observe.config import format_step_path
from miles.observe.event_bus import DurableSink
from miles.observe.rollout_reader import VOCABULARY
from miles.observe.rollouts import RolloutDump
from miles.rollout.offline.replay_source import ReplaySource, RolloutRecording


def build_rollout_dumps(config: Config, directory: Path) -> list[DurableSink]:
    """The sinks that save the groups of a run: in its directory, and where the user asked for them."""
    o, sinks = config.observe, list[DurableSink]()
    folder = config.models.hf_checkpoint
    vocabulary = None if folder is None else fingerprint_vocabulary(Path(folder))
    about = {} if vocabulary is None else {VOCABULARY: vocabulary}
    unrecorded = () if config.algo.use_rollout_indexer_replay else (INDEXER_TOPK,)
    if o.save_rollouts:
        # Routed experts are large and only read for replay.
        without = unrecorded if config.algo.use_rollout_routing_replay else (ROUTED_EXPERTS, *unrecorded)
        sinks.append(
            RolloutDump(
                directory / "rollouts", file_metadata=about, excluded_extras=without, keep=config.observe.keep_rollouts
            )
        )
    if o.save_debug_rollout_data is not None:
        path = partial(format_step_path, o.save_debug_rollout_data)
        sinks.append(RolloutDump(path, file_metadata=about, excluded_extras=unrecorded))
    if o.save_debug_train_data is not None:
        sinks.append(TrainDataDump(partial(format_step_path, o.save_debug_train_data)))
    return sinks


class TrainDataDump:
    """A sink that writes the samples of every step with ``torch.save``: a dict of lists, an entry for each sample."""

    def __init__(self, find_path: Callable[[int], Path]) -> None:
        self._find_path = find_path

    def __call__(self, event: Event) -> None:
        if not isinstance(event, BatchTaken):
            return
        path = self._find_path(event.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = event.batch.samples
        data = {
            "tokens": [torch.tensor(s.tokens) for s in samples],
            "loss_masks": [torch.tensor(s.mask) for s in samples],
            "rollout_log_probs": [torch.tensor(s.logprobs) for s in samples],
            "advantages": [torch.tensor(s.advantages) for s in samples],
            "weight_versions": [torch.tensor(s.versions) for s in samples],
            "rewards": [s.reward for s in samples],
            "prompt_ids": [s.prompt_id for s in samples],
            "trajectories": [s.trajectory for s in samples],
        }
        torch.save({"rollout_id": event.step, "rollout_data": data}, path)

    def commit(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def get_image_loader(tokenizer: Tokenizer) -> Callable[[str], ImageInput] | None:
    """What processes recorded images again; None for a checkpoint that reads text only."""
    return tokenizer.load_image if isinstance(tokenizer, ImageTokenizer) else None


def open_recorded_rollouts(config: Config, plan: Plan, tokenizer: Tokenizer, *, first: int) -> ReplaySource | None:
    """The groups of ``--load-debug-rollout-data`` from step ``first`` on; None without it; raises for missing steps."""
    path, steps = config.observe.load_debug_rollout_data, plan.steps
    if path is None:
        return None
    load = partial(torch.load, map_location="cpu", weights_only=True)
    if isinstance(tokenizer, ImageTokenizer):
        tokenizer.media.add_folder(find_media_folder(path))
    recording = RolloutRecording(
        path, load=load, reward_key=config.rollout.reward_key, load_image=get_image_loader(tokenizer)
    )
    if (missing := recording.missing(range(first, steps + 1))) is not None:
        found = recording.available_steps()
        present = f"; it has steps {found[0]} to {found[-1]}" if found else ""
        raise DataError(
            f"--load-debug-rollout-data {path} has no step {missing} ({recording.path(missing)}){present}; lower "
            "--num-rollout, or name files with every step."
        )
    assert config.models.hf_checkpoint is not None
    return ReplaySource(
        recording,
        steps=range(first, max(first, steps) + 1),
        num_groups=config.rollout.rollout_batch_size,
        num_trajectories=config.rollout.n_samples_per_prompt,
        vocabulary=fingerprint_vocabulary(Path(config.models.hf_checkpoint)),
        share=config.observe.load_debug_rollout_data_subsample or 1.0,
        needs=_list_replayed_extras(config),
    )


def _list_replayed_extras(config: Config) -> tuple[str, ...]:
    """The per-token data of recorded trajectories that the trainer replays."""
    replayed = {
        ROUTED_EXPERTS: config.algo.use_rollout_routing_replay,
        INDEXER_TOPK: config.algo.use_rollout_indexer_replay,
    }
    return tuple(name for name, used in replayed.items() if used)


def find_media_folder(recorded: str) -> Path:
    """The folder of images of recorded rollouts: of a run, of its rollouts, or beside files."""
    folder = Path(recorded.partition("{")[0])
    folder = folder if folder.is_dir() else folder.parent
    return folder / "media" if (folder / "media").is_dir() else folder.parent / "media"


class ProbingTrainer:
    """A trainer that also gets the probe samples that were waiting when the groups were recorded."""

    def __init__(self, trainer: Trainer, recorded: ReplaySource, advantages: AdvantageEstimator) -> None:
        self._trainer = trainer
        self._recorded = recorded
        self._advantages = advantages
        self.save, self.load = trainer.save, trainer.load
        self.sleep, self.wake = trainer.sleep, trainer.wake

    async def step(self, batch: Batch) -> StepReport:
        return await self._trainer.step(replace(batch, probe=self._recorded.probe(batch.step, self._advantages)))


class FrozenTrainer:
    """A PublishingTrainer that trains nothing: the loaded weights stay version 0."""

    def __init__(self, model: CausalLM) -> None:
        self._weights = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    async def step(self, batch: Batch) -> StepReport:
        return StepReport(version=Version())

    async def save(self, folder: Path) -> None:
        """Nothing has changed, so nothing is saved."""

    async def load(self, folder: Path) -> None:
        """Nothing was saved."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...
