"""Remote engines of a run: how each server is started or reached, the engine pool, and its weight transport."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from miles.backends.native.config import HEAD_ALGORITHMS
from miles.backends.remote import sglang_flags
from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool
from miles.backends.remote.pool.health_monitor import HealthConfig
from miles.backends.remote.process.server import ExternalServer, LocalServer, ServerCommand, ServerHost
from miles.backends.remote.remote_engine import RemoteEngine
from miles.backends.remote.response_stitching import RoutedExpertsShape
from miles.backends.remote.sglang_lora import build_lora_flags
from miles.backends.remote.transports.delta import DeltaTransport
from miles.backends.remote.transports.ipc import IpcTransport
from miles.backends.remote.transports.lora import LoraTransport, base_digests
from miles.backends.remote.transports.senders import (
    DiskTransport,
    DistributedTransport,
    HttpTransport,
    WeightTransport,
)
from miles.cluster.executor import Executor
from miles.cluster.straggler import EngineThroughput
from miles.config.schema import get_options
from miles.core.errors import UsageError
from miles.core.protocols import ImageTokenizer, WeightSync
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.server_checkpoint import needs_triton_fp8, prepare_server_checkpoint
from miles.launch.config import Config, ServeRoot
from miles.launch.distributed.ray_placement import get_reservation
from miles.launch.plan.drafts import choose_speculation
from miles.launch.plan.lora import build_lora, names_versions
from miles.launch.plan.plan import Plan
from miles.launch.plan.topology import count_engines, get_engine_devices
from miles.launch.runtime.run_directory import append_log_line
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.indexer_layout import build_indexer_layout
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import EXPERTS, LoraSpec
from miles.models.spec import DecoderSpec

if TYPE_CHECKING:
    from miles.cluster.ray.placement_group import ClusterReservation

API_KEY = "MILES_API_KEY"
_SERVE_SECTIONS = ("models", "media", "native")
_NOT_PASSED_ON = (
    "hf_checkpoint",
    "dtype",
    "rollout_dtype",
    "rollout_precision",
    "train_precision",
    "fp8_format",
    "speculative_algorithm",
)

# -- the engine and its weights -------------------------------------------------------------


def build_remote_engine(
    config: Config, plan: Plan, policy: PolicyCheckpoint, *, name: str, report: Callable[[str], None]
) -> RemoteEngine:
    """The servers of a policy, which ``build_remote_sync`` starts; ``report`` is called with notes for the user."""
    s, eos_token_id = config.sglang, policy.tokenizer.eos_token_id
    addresses = s.rollout_external_engine_addrs
    names = [f"{name} {i}" for i in range(len(addresses) or count_engines(config))]
    log = _open_engine_log(plan)
    pool = EnginePool(
        names,
        eos_token_ids=frozenset(policy.spec.eos_token_ids) | frozenset([] if eos_token_id is None else [eos_token_id]),
        decode=lambda tokens: policy.tokenizer.decode(list(tokens)),
        experts=_build_routed_experts_shape(policy.spec) if returns_routed_experts(config) else None,
        indexer=build_indexer_layout(policy.spec) if config.algo.use_rollout_indexer_replay else None,
        mode=config.async_rollout.pause_generation_mode,
        throughput=EngineThroughput(config.fault_tolerance.slow_rank_factor, log=(log, report)),
        log=log,
    )
    launchers = ServerLaunchers(
        config,
        plan,
        policy,
        routed_experts=pool.experts is not None,
        indexer_topk=pool.indexer is not None,
        report=report,
    )
    if addresses:
        servers = [launchers.external(server, address) for server, address in zip(names, addresses, strict=True)]
    else:
        servers = [launchers.own(server, index) for index, server in enumerate(names)]
    health = HealthConfig(
        interval=s.rollout_health_check_interval,
        timeout=s.rollout_health_check_timeout,
        first_wait=s.rollout_health_check_first_wait,
        max_restarts=s.rollout_max_restarts,
    )
    return RemoteEngine(pool, servers, health, log)


def build_remote_sync(
    config: Config,
    plan: Plan,
    policy: PolicyCheckpoint,
    servers: RemoteEngine,
    weights: Callable[[], Mapping[str, Tensor]],
    run: Executor,
    adapters: Callable[[], LoraAdapters | None],
) -> WeightSync:
    """The weight sync that sends ``weights``, or only the LoRA ``adapters``, to the servers; starts them."""
    s = config.sglang
    return servers.sync(
        weights,
        policy.rollout_spec,
        transport=_build_transport(config, plan, policy, adapters),
        executor=run,
        bucket_bytes=s.update_weight_buffer_size,
        seconds=s.update_weight_timeout,
        layout="checkpoint" if s.rollout_backend == "sglang" and policy.rollout_adapters is None else "packed",
        self_test=s.check_weight_update_equal,
        num_versions=config.lora.lora_versions if names_versions(config) else 0,
    )


def _build_transport(
    config: Config, plan: Plan, policy: PolicyCheckpoint, adapters: Callable[[], LoraAdapters | None]
) -> WeightTransport:
    s = config.sglang
    log = _open_engine_log(plan)
    current = adapters()
    if current is not None and _can_send_adapters(config, policy):
        return _build_lora_transport(policy, adapters, current.lora, s.update_weight_timeout, log)
    match s.update_weight_transport:
        case "ipc":
            return IpcTransport()
        case "tensor":
            return HttpTransport()
        case "delta":
            return DeltaTransport()
        case "disk":
            return DiskTransport(_get_weights_folder(plan), prepare_server_checkpoint(config, plan, policy))
        case "distributed":
            cluster = get_reservation(plan.policy)
            if cluster is None:
                return DistributedTransport(policy.platform, s.update_weight_timeout)
            return DistributedTransport(policy.platform, s.update_weight_timeout, address=cluster.address)
        case "auto":
            return IpcTransport(HttpTransport(), log)


def _get_weights_folder(plan: Plan) -> Path:
    """Where weights for servers are written; each of several policies has a folder of its own."""
    folder = plan.run_dir / "weights"
    return folder if plan.policy is None else folder / plan.policy


def _can_send_adapters(config: Config, policy: PolicyCheckpoint) -> bool:
    """Whether servers are ours with the trainer's weights, and the user chose no transport."""
    s = config.sglang
    ours = s.rollout_backend == "served" and not s.rollout_external_engine_addrs
    merged = policy.rollout_quantization is None and policy.rollout_adapters is None
    same = policy.rollout_dtype == policy.dtype and merged
    has_head = config.native.speculative_algorithm in HEAD_ALGORITHMS  # whose weights are not adapters
    is_native = not isinstance(policy.spec, HfAdapterSpec)
    return ours and s.update_weight_transport == "auto" and same and is_native and not has_head


def _build_lora_transport(
    policy: PolicyCheckpoint,
    adapters: Callable[[], LoraAdapters | None],
    lora: LoraSpec,
    seconds: float,
    log: Callable[[str], None],
) -> LoraTransport:
    folder, spec, dtype = policy.folder, policy.spec, policy.dtype

    def get_adapters() -> LoraAdapters:
        found = adapters()  # restarted ranks have others
        assert found is not None
        return found

    return LoraTransport(get_adapters, lambda: base_digests(folder, spec, lora, dtype), seconds=seconds, log=log)


def returns_routed_experts(config: Config) -> bool:
    """Whether responses have routed experts: stock SGLang when started with its flag, ours as the flag says."""
    if config.sglang.rollout_backend == "sglang" or config.sglang.rollout_external_engine_addrs:
        return config.algo.use_rollout_routing_replay
    return config.native.engine_return_routed_experts


def _build_routed_experts_shape(spec: DecoderSpec) -> RoutedExpertsShape | None:
    if spec.moe is None:
        return None
    return RoutedExpertsShape(
        num_layers=len(spec.moe_layers),
        experts_per_token=spec.moe.experts_per_token,
        num_experts=spec.moe.num_experts,
    )


def _open_engine_log(plan: Plan) -> Callable[[str], None]:
    """A function that appends a line with the time to logs/engines.log."""
    path = plan.run_dir / "logs" / "engines.log"
    return lambda text: append_log_line(path, text)


# -- servers --------------------------------------------------------------------------------


class ServerLaunchers:
    """Creates the hosts of servers, at start and later. Servers of the run share an API key made here."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        policy: PolicyCheckpoint,
        *,
        routed_experts: bool,
        indexer_topk: bool,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._policy = policy
        self._report = report
        self._routed_experts = routed_experts
        self._indexer_topk = indexer_topk
        self._token = secrets.token_hex(16)

    def external(self, name: str, address: str, *, seconds: float | None = None) -> ServerHost:
        """A server that runs already; it gets the user's token for such servers, never the run's own key."""
        s = self._config.sglang
        token = None if s.rollout_engine_token_env is None else os.environ[s.rollout_engine_token_env]
        timeout = s.rollout_start_timeout if seconds is None else seconds
        return ExternalServer(name, normalize_url(address), self._connect(name, token), seconds=timeout)

    def own(self, name: str, index: int) -> ServerHost:
        """A server to start: a process on this machine, or on a node of the reserved Ray cluster.

        ``index`` selects its GPUs: 0 has the first ones after the trainer's, -1 the last ones of the trainer, which
        the trainer must have released.
        """
        s, cluster = self._config.sglang, get_reservation(self._plan.policy)
        log = self._plan.run_dir / "logs" / f"{name.replace(' ', '-')}.log"
        folder = prepare_server_checkpoint(self._config, self._plan, self._policy, self._report)
        command = _build_server_command(self._config, self._policy, folder, self.get_gpus(index), self._token, cluster)
        connect = self._connect(name, self._token if s.rollout_backend == "served" or cluster is not None else None)
        if cluster is None:
            return LocalServer(name, command, log, connect, seconds=s.rollout_start_timeout)
        from miles.backends.remote.process.ray_server import RayServer

        return RayServer(name, index, command, log, connect, cluster, s.rollout_start_timeout)

    def get_gpus(self, index: int) -> range:
        """The GPUs of the server with that index."""
        return get_engine_devices(self._config, index, self._plan.engine_offset)

    def _connect(self, name: str, token: str | None) -> Callable[[str], SglangClient]:
        vocab_size, routed_experts = self._policy.spec.vocab_size, self._routed_experts
        tokenizer = self._policy.tokenizer
        media = tokenizer.media if isinstance(tokenizer, ImageTokenizer) else None
        return lambda url: SglangClient(
            url,
            name,
            token=token,
            vocab_size=vocab_size,
            routed_experts=routed_experts,
            indexer_topk=self._indexer_topk,
            media=media,
        )


def normalize_url(address: str) -> str:
    """The address with a scheme and without a trailing slash."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _build_server_command(
    config: Config,
    policy: PolicyCheckpoint,
    folder: Path,
    gpus: range,
    token: str,
    cluster: ClusterReservation | None,
) -> ServerCommand:
    ranks, device = config.cluster.rollout_num_gpus_per_engine, policy.platform.device.type
    dtype = str(policy.rollout_dtype).removeprefix("torch.")
    # On a cluster the node assigns GPUs; the server is reachable from other nodes there, so it needs a key.
    visible = _set_visible_gpus(gpus) if device != "cpu" and cluster is None else {}
    threads = config.cluster.num_threads
    if config.sglang.rollout_backend == "sglang":
        argv = sglang_flags.build_command(
            config.sglang.sglang_python or sys.executable,
            str(folder.resolve()),
            config.sglang.sglang_flags,
            device=device,
            dtype=dtype,
            kv_cache_dtype=config.models.kv_cache_dtype,
            ranks=ranks,
            routed_experts=returns_routed_experts(config) and policy.spec.moe is not None,
            trust_remote_code=policy.trust_remote_code,
            triton_fp8=needs_triton_fp8(policy),
            images=isinstance(policy.tokenizer, ImageTokenizer),
            lora=_build_lora_flags(config, policy, device),
        )
        environment = {**sglang_flags.build_environment(device), **visible}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        return ServerCommand(argv=argv, environment=environment, settings={} if cluster is None else {"api-key": token})
    argv = (sys.executable, "-m", "miles.launch.main", "serve", str(folder.resolve()))
    argv += ("--device", device, "--dtype", dtype, "--tensor-parallel-size", str(ranks))
    argv += ("--incremental-streaming-output", "--drain-seconds", "1")
    if config.models.rollout_format is not None:
        argv += ("--rollout-precision", config.models.rollout_format)
    if threads is not None:
        argv += ("--num-threads", str(threads))
    return ServerCommand(argv=(*argv, *_build_serve_flags(config, policy)), environment={API_KEY: token, **visible})


def _build_lora_flags(config: Config, policy: PolicyCheckpoint, device: str) -> dict[str, tuple[str, ...]]:
    """SGLang's flags for the run's adapters, if it applies them beside its weights.

    A batch may have those of each version that a request may have begun with, of the next one, and the base.
    """
    lora = build_lora(config.lora, policy.spec) if policy.rollout_adapters is not None else None
    if lora is None:
        return {}
    return build_lora_flags(policy.spec, lora, device=device, num_adapters=config.schedule.max_weight_staleness + 3)


def _build_serve_flags(config: Config, policy: PolicyCheckpoint) -> list[str]:
    """The model and engine options that are not at their defaults, as flags of ``miles serve``.

    What engines draft with is chosen for the run, not by each server. The server has adapters if the engine applies
    them beside its weights: its own one, or those that it is sent by name.
    """
    words = ["--speculative-algorithm", choose_speculation(config).algorithm]
    named = policy.rollout_adapters is not None and names_versions(config)
    sections = _SERVE_SECTIONS if policy.rollout_adapters is None or named else (*_SERVE_SECTIONS, "lora")
    if named:
        words += _build_version_flags(config, policy)
    for option in get_options(ServeRoot).values():
        if option.section not in sections or option.name in _NOT_PASSED_ON:
            continue
        value = getattr(getattr(config, option.section), option.name)
        if value == option.default:
            continue
        if value is False or value is None or value == ():
            assert option.negation is not None
            words.append(option.negation)
        else:
            values = value if isinstance(value, tuple) else () if value is True else (value,)
            words += [option.flag, *map(str, values)]
    if config.algo.use_rollout_indexer_replay and not config.native.engine_return_indexer_topk:
        words.append("--engine-return-indexer-topk")
    head = config.train.draft_load
    if config.native.speculative_algorithm == "eagle3" and config.native.speculative_draft_model_path is None and head:
        words += ["--speculative-draft-model-path", str(Path(head).resolve())]  # a trained one may differ in its sizes
    return words


def _build_version_flags(config: Config, policy: PolicyCheckpoint) -> list[str]:
    """The flags of a server of ours that is sent each version of the run's adapters under its own name."""
    lora = build_lora(config.lora, policy.spec)
    assert lora is not None
    modules = dict.fromkeys(EXPERTS if target.num_experts else target.short_name for target in lora.targets)
    slots = config.lora.lora_versions + 1
    words = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--max-loras-per-batch", str(slots)]
    return [*words, "--lora-target-modules", *modules]


def _set_visible_gpus(gpus: range) -> dict[str, str]:
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    if known is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    visible = known.split(",")
    if gpus.stop > len(visible):
        raise UsageError(
            f"an engine needs GPUs {gpus[0]} to {gpus[-1]}, but CUDA_VISIBLE_DEVICES has {len(visible)}; lower "
            "--rollout-num-gpus."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpus.start : gpus.stop])}
