"""Reward model trained with LoRA: adapters and the score head over a frozen decoder.

A checkpoint is a sequence classifier with the adapters merged into it. Its adapter folder is one of the PEFT library
for this classifier, with the score head among its ``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from miles.backends.fsdp.lora_model import LoraBaseModel, LoraModel
from miles.models.checkpoint import peft
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.sequence_classifier import SCORE
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import LoraSpec
from miles.train.batch_tensors import PackedSequences
from miles.train.model_protocols import KeptTensors, ValueCallback


class HeadRewardModel(Protocol):
    """A reward model of which the score head alone is trained; every rank has it in full."""

    @property
    def backbone(self) -> LoraBaseModel: ...
    @property
    def head_parameters(self) -> Mapping[str, Tensor]: ...
    def freeze_backbone(self) -> None: ...
    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback, /
    ) -> list[KeptTensors]: ...
    def finalize_grads(self) -> None: ...
    def save(self, folder: Path) -> None: ...
    def save_plan(self) -> SavePlan | None: ...
    def load(self, folder: Path) -> None: ...


class LoraRewardModel(LoraModel):
    """A ScoreModel over ``reward_model``, whose decoder is frozen here."""

    saved_tensors = (SCORE,)

    def __init__(
        self, reward_model: HeadRewardModel, lora: LoraSpec, *, base: Path, seed: int, start: Path | None = None
    ) -> None:
        self._reward_model = reward_model
        reward_model.freeze_backbone()
        super().__init__(reward_model.backbone, lora, base=base, seed=seed, start=start)

    def parameters(self) -> Mapping[str, Tensor]:
        return {**super().parameters(), **self._reward_model.head_parameters}

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback
    ) -> list[KeptTensors]:
        return self.run_with_dropout(self._reward_model.forward_backward_scores, micro_batches, callback)

    def finalize_grads(self) -> None:
        self._reward_model.finalize_grads()
        self.sum_factor_grads(self._adapters)

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local if name in self._reward_model.head_parameters else super().gather(name, local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full if name in self._reward_model.head_parameters else super().shard(name, full)

    def move(self, device: torch.device) -> None:
        super().move(device)
        for parameter in self._reward_model.head_parameters.values():
            parameter.data = parameter.data.to(device)

    def save_plan(self) -> SavePlan | None:
        plan = self._reward_model.save_plan()
        return None if plan is None else self.plan_adapters(plan, self._adapters)

    def plan_adapters(self, plan: SavePlan, adapters: LoraAdapters) -> SavePlan:
        plan = super().plan_adapters(plan, adapters)
        score = self._reward_model.head_parameters[SCORE]
        unit = replace(single_tensor_unit(peft.peft_tensor_name(SCORE), score), name=SCORE)
        name = f"{peft.FOLDER}/{peft.WEIGHTS}"
        return replace(plan, extra_files={**plan.extra_files, name: (*plan.extra_files[name], unit)})

    def _save_weights(self, folder: Path) -> None:
        self._reward_model.save(folder)

    def _export_adapters(self, adapters: LoraAdapters) -> dict[str, Tensor]:
        score = self._reward_model.head_parameters[SCORE].detach().cpu().clone()
        return super()._export_adapters(adapters) | {SCORE: score}

    def _load_weights(self, folder: Path) -> None:
        self._reward_model.load(folder)

    def _peft_config(self) -> dict[str, object]:
        saved = [SCORE.removesuffix(".weight")]
        return super()._peft_config() | {"task_type": "SEQ_CLS", "modules_to_save": saved}
