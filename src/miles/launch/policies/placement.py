"""Placement of policies: who trains each one, and on which devices its ranks and engines are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles.cluster.ray.placement import ResourceRequest
from miles.launch.config import Config
from miles.launch.plan.topology import (
    build_resource_request,
    count_engines,
    get_engine_devices,
    get_world_size,
    is_distributed,
    is_remote,
    shares_devices,
    uses_ray,
)
from miles.launch.policies.config import PolicyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPlacement:
    """Where a policy with its own weights is: devices by their number on this machine, from the run's first one on.

    ``ranks`` are those of its trainer, none if it is frozen; with ``detached`` these are processes of its own. Servers
    are ``engine_offset`` devices further than those of a run with this policy alone.
    """

    ranks: range
    engines: range
    engine_offset: int = 0
    detached: bool = False


def trains_in_ranks(policies: Sequence[PolicyConfig]) -> bool:
    """Whether some policy has several ranks, so that each but the main one is trained by processes of its own."""
    if len(policies) == 1 or policies[0].config.observe.debug_rollout_only:
        return False
    trained = [policy for policy in policies if policy.owns_weights and not policy.frozen]
    return uses_ray(policies[0].config) or any(is_distributed(policy.config) for policy in trained)


def place_policies(policies: Sequence[PolicyConfig]) -> dict[str, PolicyPlacement]:
    """The placement of every policy with its own weights, by name; the main one is first.

    Without ranks all policies are trained on one device, in turns. With ranks every policy has devices of its own:
    those of the trainers, in order, and then those of engines that do not share their trainer's.
    """
    owners = [policy for policy in policies if policy.owns_weights]
    own_ranks = trains_in_ranks(policies)
    placed: dict[str, PolicyPlacement] = {}
    ranks: dict[str, range] = {}
    first = 0
    for index, policy in enumerate(owners):
        size = 0 if policy.frozen else get_world_size(policy.config) if own_ranks else 1
        ranks[policy.name] = range(first, first + size)
        first += size if own_ranks else 0
        if not own_ranks and index == len(owners) - 1:
            first = get_world_size(owners[0].config)
    for policy in owners:
        own = ranks[policy.name]
        engines, offset = _place_engines(policy, own, first, own_ranks=own_ranks)
        first = max(first, engines.stop)
        detached = own_ranks and policy is not owners[0] and not policy.frozen
        placed[policy.name] = PolicyPlacement(ranks=own, engines=engines, engine_offset=offset, detached=detached)
    return placed


def _place_engines(policy: PolicyConfig, ranks: range, free: int, *, own_ranks: bool) -> tuple[range, int]:
    """The devices of a policy's engines, and how much further they are than in a run with it alone."""
    config = policy.config
    if config.sglang.rollout_external_engine_addrs:
        return range(free, free), 0
    each = config.cluster.rollout_num_gpus_per_engine
    shares = shares_devices(config) and not (own_ranks and policy.frozen)
    if not is_remote(config):
        start = ranks.start if not (own_ranks and policy.frozen) else free
        return range(start, start + each), 0
    count = count_engines(config)
    alone = get_engine_devices(config, 0).start
    if shares:
        devices = [get_engine_devices(config, index, ranks.start - alone) for index in range(count)]
        return range(ranks.start, max(d.stop for d in devices)), ranks.start - alone
    return range(free, free + count * each), free - alone


def build_resource_requests(config: Config, policies: Sequence[PolicyConfig]) -> dict[str, ResourceRequest]:
    """What each policy with its own weights requests from the Ray cluster, by name, the main one first."""
    requests: dict[str, ResourceRequest] = {}
    for policy in (p for p in policies if p.owns_weights):
        main = policy is policies[0]
        request = build_resource_request(config if len(policies) == 1 else policy.config)
        if not main:
            request = replace(request, workers=0)
        if policy.frozen:
            request = replace(request, nodes=0, per_node=0, shared=False)
        if main or request.total:
            requests[policy.name] = request
    return requests
