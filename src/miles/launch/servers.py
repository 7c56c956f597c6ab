"""Engines behind HTTP as a run's config wants them: how many, how each is started, and how weights get there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from miles.backends.sglang.adapters import OfAdapters, base_digests
from miles.backends.sglang.carriers import ByFolder, Carrier, InRequests, OverGroup
from miles.backends.sglang.deltas import Delta
from miles.backends.sglang.fleet import Fleet
from miles.backends.sglang.keeper import Care
from miles.backends.sglang.mapped import ByMemory
from miles.backends.sglang.pace import Pace
from miles.backends.sglang.parts import Experts
from miles.backends.sglang.servers import Servers
from miles.cluster.local import Run
from miles.core.protocols import WeightSync
from miles.launch.config import Config
from miles.launch.homes import Homes, routed
from miles.launch.hosting import held
from miles.launch.plan import Plan
from miles.launch.policy import Policy
from miles.launch.server_rules import engine_count
from miles.models.lora import Adapters
from miles.models.lora_targets import Lora
from miles.models.spec import DecoderSpec


def servers_of(config: Config, plan: Plan, policy: Policy, *, name: str = "engine") -> Servers:
    """The servers of a policy, which start when they are told whose weights they get (``server_sync``)."""
    s, own = config.sglang, policy.tokenizer.eos_token_id
    addresses = s.rollout_external_engine_addrs
    names = [f"{name} {i}" for i in range(len(addresses) or engine_count(config))]
    fleet = Fleet(
        names,
        ends=frozenset(policy.spec.eos_token_ids) | frozenset([] if own is None else [own]),
        decode=lambda tokens: policy.tokenizer.decode(list(tokens)),
        experts=experts_of(policy.spec) if routed(config) else None,
        mode=config.tempo.pause_generation_mode,
    )
    tell = fleet.tell = _teller(plan.run_dir / "logs" / "engines.log")
    fleet.pace = Pace(config.faults.slow_rank_factor)
    fleet.pace.tell = (tell,)
    made = Homes(config, plan, policy, routed=fleet.experts is not None)
    homes = [made.visited(each, addresses[i]) if addresses else made.own(each, i) for i, each in enumerate(names)]
    care = Care(
        interval=s.rollout_health_check_interval,
        timeout=s.rollout_health_check_timeout,
        first_wait=s.rollout_health_check_first_wait,
        max_restarts=s.rollout_max_restarts,
    )
    return Servers(fleet, homes, care, tell)


def server_sync(
    config: Config,
    plan: Plan,
    policy: Policy,
    servers: Servers,
    weights: Callable[[], Mapping[str, Tensor]],
    run: Run,
    adapters: Callable[[], Adapters | None] = lambda: None,
) -> WeightSync:
    """The servers' weights, from now on those that ``weights`` gives, which ``adapters`` may be added to."""
    s, tell = config.sglang, _teller(plan.run_dir / "logs" / "engines.log")
    found = adapters()
    carrier: Carrier = ByMemory(InRequests(), tell)
    if found is not None and _takes_adapters(config, policy):
        carrier = _of_adapters(policy, adapters, found.lora, s.update_weight_timeout, tell)
    elif s.update_weight_transport == "ipc":
        carrier = ByMemory()
    elif s.update_weight_transport == "tensor":
        carrier = InRequests()
    elif s.update_weight_transport == "delta":
        carrier = Delta()
    elif s.update_weight_transport == "disk":
        carrier = ByFolder(plan.run_dir / "weights", policy.folder)
    elif s.update_weight_transport == "distributed":
        cluster = held()
        at = {} if cluster is None else {"address": cluster.address}
        carrier = OverGroup(policy.platform, s.update_weight_timeout, **at)
    return servers.sync(
        weights,
        policy.spec,
        carrier=carrier,
        run=run,
        bucket_bytes=s.update_weight_buffer_size,
        seconds=s.update_weight_timeout,
    )


def _takes_adapters(config: Config, policy: Policy) -> bool:
    """Whether servers are ours, compute as the trainer does, and are sent weights in no way of the user's choice."""
    s = config.sglang
    ours = s.rollout_backend == "served" and not s.rollout_external_engine_addrs
    return ours and s.update_weight_transport == "auto" and policy.rollout_dtype == policy.dtype


def _of_adapters(
    policy: Policy, adapters: Callable[[], Adapters | None], lora: Lora, seconds: float, tell: Callable[[str], None]
) -> OfAdapters:
    folder, spec, dtype = policy.folder, policy.spec, policy.dtype

    def now() -> Adapters:
        found = adapters()  # ranks that were replaced have others
        assert found is not None
        return found

    return OfAdapters(now, lambda: base_digests(folder, spec, lora, dtype), seconds=seconds, tell=tell)


def experts_of(spec: DecoderSpec) -> Experts | None:
    """How the model's experts are told of, where it has any."""
    if spec.moe is None:
        return None
    return Experts(layers=len(spec.moe_layers), chosen=spec.moe.experts_per_token, experts=spec.moe.num_experts)


def _teller(log: Path) -> Callable[[str], None]:
    """Sentences about servers go to a file of the run, each with its time."""

    def tell(sentence: str) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    return tell
