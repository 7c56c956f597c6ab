"""Engines behind HTTP as a run's config wants them: how many, how each is started, and how weights get there."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from miles.backends.sglang import flags
from miles.backends.sglang.carriers import ByFolder, Carrier, InRequests, OverGroup
from miles.backends.sglang.client import Client
from miles.backends.sglang.deltas import Delta
from miles.backends.sglang.fleet import Fleet
from miles.backends.sglang.keeper import Care
from miles.backends.sglang.launch import Home, Launched, Visited
from miles.backends.sglang.mapped import ByMemory
from miles.backends.sglang.parts import Experts
from miles.backends.sglang.process import Command
from miles.backends.sglang.servers import Servers
from miles.cluster.local import Run
from miles.config.table import Dataclass, knobs_of
from miles.core.errors import UsageError
from miles.core.protocols import WeightSync
from miles.launch.config import Config, ServeRoot
from miles.launch.hosting import held
from miles.launch.plan import Plan
from miles.launch.policy import Policy
from miles.launch.server_rules import engine_count
from miles.models.spec import DecoderSpec

KEY = "MILES_API_KEY"
_ROOMS = ("models", "native")
_NOT_SERVED = ("hf_checkpoint", "dtype", "rollout_dtype")


def servers_of(config: Config, plan: Plan, policy: Policy, *, name: str = "engine") -> Servers:
    """The servers of a policy, which start when they are told whose weights they get (``server_sync``)."""
    s, own = config.sglang, policy.tokenizer.eos_token_id
    addresses = s.rollout_external_engine_addrs
    names = [f"{name} {i}" for i in range(len(addresses) or engine_count(config))]
    fleet = Fleet(
        names,
        ends=frozenset(policy.spec.eos_token_ids) | frozenset([] if own is None else [own]),
        decode=lambda tokens: policy.tokenizer.decode(list(tokens)),
        experts=experts_of(policy.spec) if _routed(config) else None,
    )
    token = _token(s.rollout_engine_token_env) if addresses else secrets.token_hex(16)

    def connect(of: str) -> Callable[[str], Client]:
        key = token if addresses or s.rollout_backend == "served" or held() is not None else None
        spec = policy.spec
        return lambda url: Client(url, of, token=key, vocabulary=spec.vocab_size, routed=fleet.experts is not None)

    homes: list[Home] = []
    for i, each in enumerate(names):
        if addresses:
            url = addresses[i] if "://" in addresses[i] else f"http://{addresses[i]}"
            homes.append(Visited(each, url, connect(each), seconds=s.rollout_start_timeout))
        else:
            log = plan.run_dir / "logs" / f"{each.replace(' ', '-')}.log"
            command = _command(config, policy, i, token)
            homes.append(_home(each, i, command, log, connect(each), s.rollout_start_timeout))
    care = Care(
        interval=s.rollout_health_check_interval,
        timeout=s.rollout_health_check_timeout,
        first_wait=s.rollout_health_check_first_wait,
        max_restarts=s.rollout_max_restarts,
    )
    return Servers(fleet, homes, care, _teller(plan.run_dir / "logs" / "engines.log"))


def _home(
    name: str, number: int, command: Command, log: Path, connect: Callable[[str], Client], seconds: float
) -> Home:
    """A process of this machine, or of a node of the cluster that the run was placed on."""
    if (cluster := held()) is None:
        return Launched(name, command, log, connect, seconds=seconds)
    from miles.backends.sglang.hosted import Hosted

    return Hosted(name, number, command, log, connect, cluster, seconds)


def server_sync(
    config: Config,
    plan: Plan,
    policy: Policy,
    servers: Servers,
    weights: Callable[[], Mapping[str, Tensor]],
    run: Run,
) -> WeightSync:
    """The servers' weights, from now on those that ``weights`` gives."""
    s = config.sglang
    carrier: Carrier = ByMemory(InRequests(), _teller(plan.run_dir / "logs" / "engines.log"))
    if s.update_weight_transport == "ipc":
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


def experts_of(spec: DecoderSpec) -> Experts | None:
    """How the model's experts are told of, where it has any."""
    if spec.moe is None:
        return None
    return Experts(layers=len(spec.moe_layers), chosen=spec.moe.experts_per_token, experts=spec.moe.num_experts)


def _routed(config: Config) -> bool:
    """Stock SGLang records experts only when it was started to; ours do as --engine-record-routing says."""
    if config.sglang.rollout_backend == "sglang" or config.sglang.rollout_external_engine_addrs:
        return config.algo.use_rollout_routing_replay
    return config.native.engine_record_routing


def _command(config: Config, policy: Policy, number: int, token: str | None) -> Command:
    ranks, device = config.cluster.rollout_num_gpus_per_engine, policy.platform.device.type
    dtype = str(policy.rollout_dtype).removeprefix("torch.")
    # On a cluster the node gives an engine its devices, and others reach it there, so that it asks for a key.
    around = _visible(config, number) if device != "cpu" and held() is None else {}
    if config.sglang.rollout_backend == "sglang":
        words = flags.command(
            config.sglang.sglang_python or sys.executable,
            str(policy.folder.resolve()),
            config.sglang.sglang_flags,
            device=device,
            dtype=dtype,
            ranks=ranks,
            routed=_routed(config) and policy.spec.moe is not None,
            trusted=policy.trusted,
        )
        threads = {"OMP_NUM_THREADS": str(config.cluster.num_threads)} if config.cluster.num_threads else {}
        settings = {} if held() is None or token is None else {"api-key": token}
        return Command(words=words, environment={**flags.environment(device), **threads, **around}, settings=settings)
    words = (sys.executable, "-m", "miles.launch.main", "serve", str(policy.folder.resolve()))
    words += ("--device", device, "--dtype", dtype, "--tensor-parallel-size", str(ranks))
    words += ("--incremental-streaming-output", "--drain-seconds", "1")
    if config.cluster.num_threads is not None:
        words += ("--num-threads", str(config.cluster.num_threads))
    assert token is not None
    return Command(words=(*words, *_spelled(config)), environment={KEY: token, **around})


def _spelled(config: Config) -> list[str]:
    """The knobs of model and engine that are not at their defaults, as flags of ``miles serve``."""
    words: list[str] = []
    for knob in knobs_of(ServeRoot).values():
        if knob.room not in _ROOMS or knob.name in _NOT_SERVED:
            continue
        room: Dataclass = getattr(config, knob.room)
        value = getattr(room, knob.name)
        if value == knob.default:
            continue
        if value is False or value is None or value == ():
            assert knob.negation is not None
            words.append(knob.negation)
        else:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [knob.flag, *map(str, values)]
    return words


def _visible(config: Config, number: int) -> dict[str, str]:
    """Which devices a server sees: its own behind the trainer's, or, where they are shared, from the first on."""
    per, apart = config.cluster.rollout_num_gpus_per_engine, config.cluster.rollout_num_gpus is not None
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = (config.cluster.actor_num_gpus_per_node if apart else 0) + number * per
    if known is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(per))}
    devices = known.split(",")
    if first + per > len(devices):
        raise UsageError(
            f"engine {number} is to have devices {first} to {first + per - 1}, and CUDA_VISIBLE_DEVICES has "
            f"{len(devices)}; ask for fewer with --rollout-num-gpus."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + per])}


def _token(variable: str | None) -> str | None:
    return None if variable is None else os.environ[variable]


def _teller(log: Path) -> Callable[[str], None]:
    """Sentences about servers go to a file of the run, each with its time."""

    def tell(sentence: str) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")

    return tell
