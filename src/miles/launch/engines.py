"""The engine a run samples with, built as its config says and waiting for its first weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from miles.backends.native.engine import NativeEngine
from miles.cluster import platform
from miles.cluster.local import Inline, Run
from miles.core.protocols import WeightSync
from miles.core.types import Version
from miles.launch.config import Config
from miles.launch.plan import Plan
from miles.launch.policy import Policy, load_model
from miles.launch.server_rules import is_remote
from miles.models import impl
from miles.models.decoder import Decoder
from miles.models.door import Model
from miles.models.lora import Adapters
from miles.models.provide import provided
from miles.sync.publish import Publication, Transport

if TYPE_CHECKING:
    from miles.backends.sglang.servers import Servers

RolloutEngine: TypeAlias = "NativeEngine | Servers"
"""What a run samples with; it can be slept, woken and closed."""


def engine_of(config: Config, policy: Policy, run: Run, like: Model | None, *, name: str = "engine 0") -> NativeEngine:
    """An engine for what ``like`` is, else for what the policy is, that waits for its first weights."""
    return NativeEngine(
        policy.spec if like is None else like.spec,
        device=policy.platform.device,
        dtype=policy.rollout_dtype,
        config=config.native,
        run=run,
        decode=policy.tokenizer.decode,
        name=name,
        model=None if like is None else _unfilled(policy, like),
        devices=platform.several(policy.platform.device, config.cluster.rollout_num_gpus_per_engine),
    )


def _unfilled(policy: Policy, like: Model) -> Model | None:
    """What the engine fills with published tensors, made as ``like`` was; None where it makes one by itself."""
    blank = impl.unfilled(like)
    if policy.provide is None or blank is not None:
        return blank
    return provided(Decoder(like.spec, device="meta", dtype=policy.rollout_dtype), policy.provide)


def rollout_engine_of(
    config: Config, plan: Plan, policy: Policy, run: Run, like: Model | None, *, name: str = "engine 0"
) -> NativeEngine | Servers:
    """What a run samples with: the engine of this process, or servers that wait to be told whose weights they get."""
    if not is_remote(config):
        return engine_of(config, policy, run, like, name=name)
    from miles.launch.servers import servers_of

    return servers_of(config, plan, policy, name="engine" if name == "engine 0" else name)


def sync_of(
    config: Config,
    plan: Plan,
    policy: Policy,
    engine: NativeEngine | Servers | None,
    weights: Callable[[], Mapping[str, Tensor]],
    run: Run,
    *,
    copies: bool,
    adapters: Callable[[], Adapters | None] = lambda: None,
) -> WeightSync:
    """How ``weights`` get to the engine; in this process they are shared, unless the engine ``copies`` them.

    To servers go the ``adapters`` alone, where the weights are a base and these.
    """
    given = weights if policy.rollout_dtype == policy.dtype else rounded(policy, weights)
    if engine is None or isinstance(engine, NativeEngine):
        engines, found = [] if engine is None else [engine], adapters()
        how: Transport = "copy" if copies else "shared" if given is weights else "made"
        moving = None if found is None else frozenset(found.places)
        return Publication(weights=given, engines=engines, transport=how, run=run, moving=moving)
    from miles.launch.servers import server_sync

    return server_sync(config, plan, policy, engine, given, run, adapters)


async def lone_engine(config: Config, policy: Policy, *, name: str = "actor") -> NativeEngine:
    """An engine with the checkpoint's own weights, as version 0 of the policy ``name``."""
    # What several devices share need not fit on one.
    whole = config.cluster.rollout_num_gpus_per_engine == 1
    sampled = replace(policy, dtype=policy.rollout_dtype)
    model = load_model(sampled if whole else replace(sampled, platform=platform.find("cpu")))
    engine = engine_of(config, policy, Inline(), model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    sync = Publication(weights=lambda: weights, engines=[engine], transport="shared", run=Inline())
    await sync.publish(Version(name))
    return engine


def rounded(policy: Policy, weights: Callable[[], Mapping[str, Tensor]]) -> Callable[[], Mapping[str, Tensor]]:
    """The weights a trainer has, in the precision the engine samples in; tensors of their own, whatever the precision.

    What loses its meaning when it is rounded stays as it is.
    """
    made = Decoder(policy.spec, device="meta", dtype=policy.rollout_dtype).named_parameters()
    dtypes = {name: parameter.dtype for name, parameter in made}
    return lambda: {name: tensor.detach().to(dtypes[name], copy=True) for name, tensor in weights().items()}
