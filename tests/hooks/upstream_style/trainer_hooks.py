"""Functions that the trainer calls, and those that follow a checkpoint and a weight update."""

from pathlib import Path

import torch

CALLS: list[tuple] = []


def init(args) -> None:
    CALLS.append(("init", args.lr))


def before_log_prob(args, model, store_prefix) -> None:
    CALLS.append(("log_prob", store_prefix, sum(p.numel() for chunk in model for p in chunk.parameters()) > 0))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None:
    for chunk in model:
        for _, parameter in chunk.named_parameters():
            assert torch.isfinite(parameter).all()
    CALLS.append(("train_step", rollout_id, step_id, opt_param_scheduler.num_steps))


def post_save(args, rollout_id: int, checkpoint_dir: str, hf_checkpoint_dir: str | None) -> None:
    CALLS.append(("save", rollout_id, Path(hf_checkpoint_dir or "", "config.json").exists()))


def post_write(args, version_dir: str, rollout_engines) -> None:
    CALLS.append(("write", Path(version_dir).name, Path(version_dir, "model.safetensors").exists()))
