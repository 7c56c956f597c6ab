"""The checkpoint a run starts from, and models beside it: read, and put on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from miles.cluster import platform
from miles.cluster.platform import Platform
from miles.launch.config import Config
from miles.launch.hooks import own
from miles.models import hub, impl
from miles.models.choice import chosen_spec
from miles.models.door import Model
from miles.models.files import read_config
from miles.models.provide import Provide, provided
from miles.models.spec import AttentionSpec, DecoderSpec
from miles.models.tokenizer import HubTokenizer, load_tokenizer
from miles.plug.points import PROVIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The checkpoint a run starts from, read but not yet on the device. ``trusted`` code of its own may run.

    What is to be made of the model beyond that, a user's function may ``provide``.
    """

    folder: Path
    config: Mapping[str, Any]
    spec: DecoderSpec
    trusted: bool
    platform: Platform
    dtype: torch.dtype
    rollout_dtype: torch.dtype
    provide: Provide | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Start):
    """It and its tokenizer, of which a rank that only trains has no need."""

    tokenizer: HubTokenizer


def read_policy(config: Config) -> Policy:
    """Look at the checkpoint, its tokenizer and the device; raises before anything large is read."""
    start = read_start(config, platform.find(config.cluster.device, threads=config.cluster.num_threads))
    known = {field.name: getattr(start, field.name) for field in fields(start)}
    return Policy(**known, tokenizer=load_tokenizer(start.folder, start.trusted))


def read_start(config: Config, found: Platform) -> Start:
    """Look at the checkpoint, to hold it on the device that was ``found``."""
    assert config.models.hf_checkpoint is not None
    folder = Path(config.models.hf_checkpoint)
    raw = read_config(folder)
    dtype, sampled = hub.choose_dtype(config.models.dtype, raw, found.device), config.models.rollout_dtype
    return Start(
        folder=folder,
        config=raw,
        spec=within(chosen_spec(folder, config.models.model_impl), config.rollout.rollout_max_context_len),
        trusted=config.models.trust_remote_code,
        platform=found,
        dtype=dtype,
        rollout_dtype=dtype if sampled == "auto" else hub.choose_dtype(sampled, raw, found.device),
        provide=own(config, PROVIDE),
    )


def spec_beside(config: Config, policy: Start, folder: Path) -> DecoderSpec:
    """What the model in ``folder`` is, when it reads what the policy reads."""
    return within(chosen_spec(folder, config.models.model_impl), policy.spec.max_positions)


def within(spec: DecoderSpec, context: int | None) -> DecoderSpec:
    """The spec for a run whose contexts have at most so many tokens.

    Only rotations with short and long factors care: a run takes one set of them throughout.
    """
    mixers = (layer.mixer for layer in spec.layers)
    stretched = any(isinstance(m, AttentionSpec) and m.rope is not None and m.rope.kind == "longrope" for m in mixers)
    if context is None or not stretched:
        return spec
    return replace(spec, max_positions=min(context, spec.max_positions))


def load_model(policy: Start, folder: Path | None = None) -> Model:
    """The policy's model with its weights on the device; or that of another checkpoint of its architecture."""
    model = impl.load(
        folder or policy.folder,
        policy.spec,
        device=policy.platform.device,
        dtype=policy.dtype,
        trust_remote_code=policy.trusted,
    )
    return provided(model, policy.provide)


def load_other(config: Config, policy: Start, folder: Path) -> Model:
    """A model of whatever architecture ``folder`` holds, to read what the policy reads."""
    return load_model(replace(policy, spec=spec_beside(config, policy, folder), provide=None), folder)
