"""Draft model of a run: the checkpoint's MTP layers or an EAGLE-3 head, and its trainer."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.launch.build.models import BaseCheckpoint, choose_save_dtype
from miles.launch.config import Config
from miles.models.draft.checkpoint import init_eagle, load_eagle, load_mtp
from miles.models.draft.eagle import EagleDraft
from miles.models.draft.mtp import MtpDraft
from miles.models.draft.spec import build_eagle_spec
from miles.train.dp_group import DataParallelGroup
from miles.train.draft_trainer import DraftTrainer


def build_draft_trainer(config: Config, policy: BaseCheckpoint, dp_group: DataParallelGroup) -> DraftTrainer | None:
    """The trainer of --draft-train, with the whole draft on this rank; None if there is none."""
    if config.train.draft_train == "none":
        return None
    return DraftTrainer(
        _load_draft(config, policy),
        train=config.train,
        temperature=config.rollout.rollout_temperature,
        save_dtype=choose_save_dtype(config, policy),
        dp_group=dp_group,
        pipeline_size=config.parallel.pipeline_model_parallel_size,
    )


def _load_draft(config: Config, policy: BaseCheckpoint) -> MtpDraft | EagleDraft:
    device: torch.device = policy.platform.device
    dtype, numerics = policy.dtype, policy.numerics
    if config.train.draft_train == "mtp":
        count = config.train.mtp_num_layers
        return load_mtp(policy.folder, policy.spec, device=device, dtype=dtype, numerics=numerics, count=count)
    if config.train.draft_load is not None:
        folder = Path(config.train.draft_load)
        return load_eagle(folder, policy.spec, device=device, dtype=dtype, numerics=numerics)
    spec = build_eagle_spec(policy.spec)
    return init_eagle(spec, seed=config.train.seed, device=device, dtype=dtype, numerics=numerics)
