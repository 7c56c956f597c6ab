"""The engine a run samples with, built as its config says and waiting for its first weights."""

from __future__ import annotations

from dataclasses import replace

from miles.backends.native.engine import NativeEngine
from miles.cluster import platform
from miles.cluster.local import Inline, Run
from miles.core.types import Version
from miles.launch.config import Config
from miles.launch.policy import Policy, load_model
from miles.models import impl
from miles.models.door import Model
from miles.sync.publish import Publication


def engine_of(config: Config, policy: Policy, run: Run, like: Model | None) -> NativeEngine:
    """An engine for what ``like`` is, else for what the policy is, that waits for its first weights."""
    return NativeEngine(
        policy.spec if like is None else like.spec,
        device=policy.platform.device,
        dtype=policy.dtype,
        config=config.native,
        run=run,
        decode=policy.tokenizer.decode,
        model=None if like is None else impl.unfilled(like),
        devices=platform.several(policy.platform.device, config.cluster.rollout_num_gpus_per_engine),
    )


async def lone_engine(config: Config, policy: Policy) -> NativeEngine:
    """An engine with the checkpoint's own weights, as version 0."""
    # What several devices share need not fit on one.
    whole = config.cluster.rollout_num_gpus_per_engine == 1
    model = load_model(policy if whole else replace(policy, platform=platform.find("cpu")))
    engine = engine_of(config, policy, Inline(), model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline()).publish(Version())
    return engine
