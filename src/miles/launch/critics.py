"""The critic of a run: which model it starts from, and the device it is on."""

from __future__ import annotations

from dataclasses import replace

import torch

from miles.backends.fsdp.value import HEAD, FsdpValue
from miles.cluster import platform
from miles.launch.config import Config
from miles.launch.plan import Plan
from miles.launch.policy import Policy, load_other
from miles.models import hub
from miles.models.files import read_config
from miles.train.critic import Critic


def critic_of(config: Config, plan: Plan, policy: Policy, *, updates: int) -> Critic | None:
    """A model of its own that learns what the policy may expect, where the advantages ask for one."""
    folder = plan.critic
    if folder is None:
        return None
    apart = config.train.critic_device != "auto"
    device = platform.device_named(config.train.critic_device, "--critic-device") if apart else policy.platform.device
    value = FsdpValue(
        load_other(config, _on(config, policy, device), folder),
        config=read_config(folder),
        like=folder,
        gradient_checkpointing=config.train.gradient_checkpointing,
    )
    if (folder / HEAD).exists():
        value.load_head(folder)
    return Critic(value, algo=config.algo, train=config.train, updates=updates, apart=apart)


def _on(config: Config, policy: Policy, device: torch.device) -> Policy:
    """How a model beside the policy is held on ``device``."""
    if device == policy.platform.device:
        return policy
    dtype = hub.choose_dtype(config.models.dtype, policy.config, device)
    return replace(policy, platform=replace(policy.platform, device=device), dtype=dtype)
