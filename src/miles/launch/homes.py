"""Where a policy's servers live: how each is started and spoken to, those of the start and those that join later."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable

from miles.backends.sglang import flags
from miles.backends.sglang.client import Client
from miles.backends.sglang.launch import Home, Launched, Visited
from miles.backends.sglang.process import Command
from miles.config.table import Dataclass, knobs_of
from miles.core.errors import UsageError
from miles.launch.config import Config, ServeRoot
from miles.launch.hosting import held
from miles.launch.plan import Plan
from miles.launch.policy import Policy

KEY = "MILES_API_KEY"
_ROOMS = ("models", "native")
_NOT_SERVED = ("hf_checkpoint", "dtype", "rollout_dtype")


class Homes:
    """Makes them. ``routed``: answers tell the experts of each token. Servers of the run share a key made here."""

    def __init__(self, config: Config, plan: Plan, policy: Policy, *, routed: bool) -> None:
        self._config, self._plan, self._policy, self._routed = config, plan, policy, routed
        self._token = secrets.token_hex(16)

    def visited(self, name: str, address: str, *, seconds: float | None = None) -> Home:
        """Of a server that runs already; it is told the key that the user has for such, never the run's own."""
        s = self._config.sglang
        token = None if s.rollout_engine_token_env is None else os.environ[s.rollout_engine_token_env]
        wait = s.rollout_start_timeout if seconds is None else seconds
        return Visited(name, url_of(address), self._connect(name, token), seconds=wait)

    def own(self, name: str, number: int) -> Home:
        """Of a server that is started: a process of this machine, or of a node of the cluster the run was placed on.

        ``number`` says which devices it has: those of 0 are the first behind the trainer's, and of -1 the trainer's
        last, which it must have let go of.
        """
        s, cluster = self._config.sglang, held()
        log = self._plan.run_dir / "logs" / f"{name.replace(' ', '-')}.log"
        command = _command(self._config, self._policy, number, self._token)
        connect = self._connect(name, self._token if s.rollout_backend == "served" or cluster is not None else None)
        if cluster is None:
            return Launched(name, command, log, connect, seconds=s.rollout_start_timeout)
        from miles.backends.sglang.hosted import Hosted

        return Hosted(name, number, command, log, connect, cluster, s.rollout_start_timeout)

    def devices(self, number: int) -> range:
        """Which of the machine's those of ``number`` are."""
        return _devices(self._config, number)

    def _connect(self, name: str, token: str | None) -> Callable[[str], Client]:
        vocabulary, routed = self._policy.spec.vocab_size, self._routed
        return lambda url: Client(url, name, token=token, vocabulary=vocabulary, routed=routed)


def url_of(address: str) -> str:
    """With what is meant where it is left out."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def routed(config: Config) -> bool:
    """Stock SGLang records experts only when it was started to; ours do as --engine-record-routing says."""
    if config.sglang.rollout_backend == "sglang" or config.sglang.rollout_external_engine_addrs:
        return config.algo.use_rollout_routing_replay
    return config.native.engine_record_routing


def _command(config: Config, policy: Policy, number: int, token: str) -> Command:
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
            routed=routed(config) and policy.spec.moe is not None,
            trusted=policy.trusted,
        )
        threads = {"OMP_NUM_THREADS": str(config.cluster.num_threads)} if config.cluster.num_threads else {}
        settings = {} if held() is None else {"api-key": token}
        return Command(words=words, environment={**flags.environment(device), **threads, **around}, settings=settings)
    words = (sys.executable, "-m", "miles.launch.main", "serve", str(policy.folder.resolve()))
    words += ("--device", device, "--dtype", dtype, "--tensor-parallel-size", str(ranks))
    words += ("--incremental-streaming-output", "--drain-seconds", "1")
    if config.cluster.num_threads is not None:
        words += ("--num-threads", str(config.cluster.num_threads))
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


def _devices(config: Config, number: int) -> range:
    per, apart = config.cluster.rollout_num_gpus_per_engine, config.cluster.rollout_num_gpus is not None
    first = (config.cluster.actor_num_gpus_per_node if apart else 0) + number * per
    return range(first, first + per)


def _visible(config: Config, number: int) -> dict[str, str]:
    """Which devices a server sees: its own behind the trainer's, or, where they are shared, from the first on."""
    found, known = _devices(config, number), os.environ.get("CUDA_VISIBLE_DEVICES")
    first, per = found.start, len(found)
    if known is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(per))}
    devices = known.split(",")
    if first + per > len(devices):
        raise UsageError(
            f"engine {number} is to have devices {first} to {first + per - 1}, and CUDA_VISIBLE_DEVICES has "
            f"{len(devices)}; ask for fewer with --rollout-num-gpus."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + per])}
