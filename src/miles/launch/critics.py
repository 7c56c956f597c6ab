"""The critic of a run: which model it starts from, and the device it is on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from miles.backends.fsdp.value import HEAD, FsdpValue
from miles.cluster import platform
from miles.launch.config import Config
from miles.launch.layout_memory import recompute_layers_of, recompute_of
from miles.launch.policy import Start, load_other
from miles.models import hub
from miles.models.files import read_config
from miles.models.recompute import set_recompute
from miles.train.critic import Critic
from miles.train.peers import Peers
from miles.train.roles import ValueModel


def critic_of(config: Config, value: ValueModel, peers: Peers, updates: int) -> Critic:
    """A model of its own that learns what the policy may expect, in ``updates`` optimizer steps."""
    apart = config.train.critic_device != "auto"
    return Critic(value, algo=config.algo, train=config.train, updates=updates, apart=apart, peers=peers)


def whole_value(config: Config, policy: Start, folder: Path) -> FsdpValue:
    """A critic that one process holds, on the device it is to have."""
    apart = config.train.critic_device != "auto"
    device = platform.device_named(config.train.critic_device, "--critic-device") if apart else policy.platform.device
    model, again = load_other(config, _on(config, policy, device), folder), recompute_of(config.train)
    set_recompute(model, again, recompute_layers_of(config.train))
    value = FsdpValue(
        model,
        config=read_config(folder),
        like=folder,
        gradient_checkpointing=again != "none",
    )
    if (folder / HEAD).exists():
        value.load_head(folder)
    return value


def _on(config: Config, policy: Start, device: torch.device) -> Start:
    """How a model beside the policy is held on ``device``."""
    if device == policy.platform.device:
        return policy
    dtype = hub.choose_dtype(config.models.dtype, policy.config, device)
    return replace(policy, platform=replace(policy.platform, device=device), dtype=dtype)
