"""Rules of engines: GPUs per engine, servers, SGLang flags, and Ray clusters. No torch, no Ray."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from miles.algo.config import OFFLINE_LOSSES
from miles.backends.native.config import HEAD_ALGORITHMS
from miles.backends.remote.sglang_flags import find_flag_problems
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.plan.hardware import choose_device, count_accelerators
from miles.launch.plan.topology import build_resource_request, get_world_size, is_remote, uses_ray
from miles.launch.rules.flags import Rule
from miles.launch.rules.paths import read_spec_or_none
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.parallel.tp_sharding import check_tp_size

_GPUS_PER_ENGINE = "--rollout-num-gpus-per-engine"
_ADDRESSES = "--rollout-external-engine-addrs"


def check_engine_tensor_parallel(c: Config) -> Iterator[str]:
    world = c.cluster.rollout_num_gpus_per_engine
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if spec is not None and (problem := check_tp_size(spec, world)) is not None:
        yield f"{_GPUS_PER_ENGINE} {world} cannot shard this model: {problem}; choose another number."


def check_engine_count(c: Config) -> Iterator[str]:
    total = c.cluster.rollout_num_gpus
    each = c.cluster.rollout_num_gpus_per_engine
    count = c.sglang.rollout_num_engines
    if total is None:
        return
    if not is_remote(c) and total != each:
        yield (
            f"--rollout-num-gpus {total} with {_GPUS_PER_ENGINE} {each} is not one engine, and this process runs only "
            "one; remove --rollout-num-gpus, or use --rollout-backend served."
        )
    elif is_remote(c) and total % each:
        yield f"--rollout-num-gpus {total} is not a multiple of {_GPUS_PER_ENGINE} {each}; change one of them."
    elif is_remote(c) and count is not None and count * each > total:
        yield (
            f"--rollout-num-engines {count} with {each} GPUs each need more than --rollout-num-gpus {total}; "
            "lower the number of engines."
        )


def check_colocation(c: Config) -> Iterator[str]:
    total, ranks = c.cluster.rollout_num_gpus, get_world_size(c)
    if c.schedule.colocate and total is not None and total > ranks:
        yield (
            f"--colocate runs engines on the trainer's {ranks} GPUs, but --rollout-num-gpus is {total}; use at most "
            f"{ranks}, or remove --colocate."
        )


def check_engine_gpus(c: Config) -> Iterator[str]:
    world, available = c.cluster.rollout_num_gpus_per_engine, count_accelerators()
    on_gpu = choose_device(c.cluster.device).name != "cpu"
    if world > 1 and available is not None and 0 < available < world and on_gpu:
        yield f"{_GPUS_PER_ENGINE} {world} exceeds the {available} GPUs of this machine; lower it."


def check_engine_draft(c: Config) -> Iterator[str]:
    native, flag = c.native, "--speculative-draft-model-path"
    algorithm, folder = native.speculative_algorithm, native.speculative_draft_model_path
    if algorithm == "draft-model" and folder is None:
        yield f"--speculative-algorithm draft-model needs {flag}, a smaller model with the policy's tokenizer."
    elif algorithm not in ("draft-model", "eagle3") and folder is not None:
        yield f"{flag} needs --speculative-algorithm draft-model or eagle3; add it, or remove {flag}."
    elif folder is not None and not (Path(folder) / "config.json").is_file():
        yield f"{flag} {folder} is not a folder with a config.json; name a checkpoint."
    elif algorithm == "draft-model" and (spec := read_spec_or_none(folder, "native")) is not None and spec.recurrent:
        yield f"{flag} {folder} has recurrent layers, whose state cannot go back; name another model."
    if algorithm == "draft-model" and c.cluster.rollout_num_gpus_per_engine > 1:
        yield (
            f"--speculative-algorithm {algorithm} needs engines of one GPU; use ngram, mtp or eagle3, or "
            f"{_GPUS_PER_ENGINE} 1."
        )
    if algorithm in HEAD_ALGORITHMS:
        yield from _check_head(c, algorithm)


def _check_head(c: Config, algorithm: str) -> Iterator[str]:
    flag, trained = f"--speculative-algorithm {algorithm}", c.train.draft_train
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if isinstance(spec, HfAdapterSpec):
        yield f"{flag} needs the native decoder, but {spec.architecture} is computed by transformers; use ngram."
    if trained not in ("none", algorithm):
        yield f"{flag} and --draft-train {trained} name different drafts; use the same for both."
    head = c.native.speculative_draft_model_path or c.train.draft_load
    if algorithm == "eagle3" and head is None and trained == "none":
        yield f"{flag} needs a head: name one by --speculative-draft-model-path, or train one by --draft-train eagle3."


def check_sglang_flags(c: Config) -> Iterator[str]:
    words = c.sglang.sglang_flags
    if c.sglang.rollout_backend == "sglang" and not c.sglang.rollout_external_engine_addrs:
        yield from find_flag_problems(words)


def check_external_servers(c: Config) -> Iterator[str]:
    addresses, variable = c.sglang.rollout_external_engine_addrs, c.sglang.rollout_engine_token_env
    if addresses and c.sglang.rollout_num_engines is not None:
        yield f"{_ADDRESSES} names running servers, so --rollout-num-engines has no effect; remove it."
    if len(set(addresses)) != len(addresses):
        yield f"{_ADDRESSES} names a server twice; name each once."
    if variable is not None and is_remote(c) and not os.environ.get(variable):
        yield f"--rollout-engine-token-env {variable}: this environment variable is unset or empty; set it."


def check_server_packages(c: Config) -> Iterator[str]:
    if is_remote(c) and find_spec("aiohttp") is None:
        yield "Engines behind HTTP need the package aiohttp: pip install 'miles-rl[sglang]'."
    if c.agents.custom_agent_function_path and find_spec("aiohttp") is None:
        yield "--custom-agent-function-path needs aiohttp, which is not installed: pip install 'miles-rl[serve]'."
    if c.sglang.rollout_backend == "served" and find_spec("prometheus_client") is None:
        yield "--rollout-backend served needs the packages of miles serve: pip install 'miles-rl[serve]'."
    if c.sglang.rollout_backend != "sglang" or c.sglang.rollout_external_engine_addrs:
        return
    python = c.sglang.sglang_python
    if python is None and find_spec("sglang") is None:
        yield (
            "--rollout-backend sglang needs sglang, which is not installed in this environment; install it, or name an "
            "interpreter that has it with --sglang-python."
        )
    elif python is not None and shutil.which(python) is None:
        yield f"--sglang-python {python} is not an executable; name a Python interpreter."


def check_ray_package(c: Config) -> Iterator[str]:
    if uses_ray(c) and find_spec("ray") is None:
        yield "--runtime ray needs the package ray: pip install 'miles-rl[ray]'."


def check_ray(c: Config) -> Iterator[str]:
    if not uses_ray(c):
        return
    if not is_remote(c) and c.algo.loss_type not in OFFLINE_LOSSES:
        yield "--runtime ray starts engines as servers on its nodes; use --rollout-backend served or sglang."
    if c.sglang.rollout_backend == "sglang" and c.sglang.update_weight_transport == "tensor":
        yield (
            "--update-weight-transport tensor shares memory on one machine, but --runtime ray may place SGLang on "
            "another; use distributed, or disk where all nodes share the run directory."
        )
    try:
        build_resource_request(c)
    except UsageError as error:
        yield f"{error.problems[0]}."


ENGINE_RULES: tuple[Rule, ...] = (
    check_engine_tensor_parallel,
    check_engine_count,
    check_engine_draft,
    check_sglang_flags,
)
SERVER_RULES: tuple[Rule, ...] = (check_colocation, check_external_servers, check_ray)
ENGINE_MACHINE_RULES: tuple[Rule, ...] = (
    check_engine_gpus,
    check_server_packages,
    check_ray_package,
)
