"""Rules of engines behind HTTP: what must be there, and which flags do not go together. No torch."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from miles.backends.sglang.flags import PREFIX, names_of, problems
from miles.launch.config import Config

_ADDRESSES = "--rollout-external-engine-addrs"


def is_remote(c: Config) -> bool:
    """Do processes of their own sample?"""
    return c.sglang.rollout_backend != "native" or bool(c.sglang.rollout_external_engine_addrs)


def engine_count(c: Config) -> int:
    """How many servers are started: as many as asked for, or as fit on the rollout plane's devices."""
    if c.sglang.rollout_num_engines is not None:
        return c.sglang.rollout_num_engines
    shared = c.cluster.actor_num_nodes * c.cluster.actor_num_gpus_per_node
    total = shared if c.cluster.rollout_num_gpus is None else c.cluster.rollout_num_gpus
    return max(1, total // c.cluster.rollout_num_gpus_per_engine)


def devices_make_whole_engines(c: Config) -> Iterator[str]:
    total, each = c.cluster.rollout_num_gpus, c.cluster.rollout_num_gpus_per_engine
    if is_remote(c) and total is not None and total % each:
        yield f"--rollout-num-gpus {total} are no whole number of engines of --rollout-num-gpus-per-engine {each}."
    wanted = c.sglang.rollout_num_engines
    if wanted is not None and not is_remote(c):
        yield f"--rollout-num-engines {wanted} is for servers; say --rollout-backend served, or leave it out."
    elif wanted is not None and total is not None and wanted * each > total:
        yield f"--rollout-num-engines {wanted} of {each} devices each need more than --rollout-num-gpus {total}."


def flags_of_sglang_are_for_sglang(c: Config) -> Iterator[str]:
    words = c.sglang.sglang_flags
    if c.sglang.rollout_backend == "sglang" and not c.sglang.rollout_external_engine_addrs:
        yield from problems(words)
        return
    for name in names_of(words):
        yield f"{PREFIX}{name} is for servers that --rollout-backend sglang starts; say that, or leave it out."


def servers_that_run_already_are_not_started(c: Config) -> Iterator[str]:
    addresses, variable = c.sglang.rollout_external_engine_addrs, c.sglang.rollout_engine_token_env
    if addresses and c.sglang.rollout_num_engines is not None:
        yield f"{_ADDRESSES} names servers that run already, so --rollout-num-engines means nothing; leave it out."
    if len(set(addresses)) != len(addresses):
        yield f"{_ADDRESSES} names a server twice; name each once."
    if variable is not None and not is_remote(c):
        yield f"--rollout-engine-token-env is for {_ADDRESSES} and servers that join later; leave it out."
    elif variable is not None and not os.environ.get(variable):
        yield f"--rollout-engine-token-env {variable}: there is no such environment variable, or it is empty."


def what_servers_need_is_installed(c: Config) -> Iterator[str]:
    if is_remote(c) and find_spec("aiohttp") is None:
        yield "Engines behind HTTP need the package aiohttp: pip install 'miles-rl[sglang]'."
    if c.sglang.rollout_backend == "served" and find_spec("prometheus_client") is None:
        yield "--rollout-backend served needs what miles serve needs: pip install 'miles-rl[serve]'."
    if c.sglang.rollout_backend != "sglang" or c.sglang.rollout_external_engine_addrs:
        return
    python = c.sglang.sglang_python
    if python is None and find_spec("sglang") is None:
        yield (
            "--rollout-backend sglang needs sglang, which this environment does not have; install it, or name an "
            "interpreter that has it with --sglang-python."
        )
    elif python is not None and shutil.which(python) is None:
        yield f"--sglang-python {python} is no program that can be run."


def arithmetic_is_ours_on_engines_of_ours(c: Config) -> Iterator[str]:
    if c.models.parity == "exact" and c.sglang.rollout_backend == "sglang":
        yield "--parity exact is arithmetic that SGLang does not have; use --rollout-backend served, or leave it out."


def likeliest_tokens_are_seen_in_this_process(c: Config) -> Iterator[str]:
    asks = c.rollout.opd_teacher_urls and c.algo.opd_log_prob_top_k > 0 and c.algo.opd_top_k_strategy != "only-teacher"
    if asks and is_remote(c):
        yield (
            f"--opd-top-k-strategy {c.algo.opd_top_k_strategy} looks at the engine's likeliest tokens, which only "
            "--rollout-backend native shows; use only-teacher."
        )


SERVERS = (
    devices_make_whole_engines,
    servers_that_run_already_are_not_started,
    what_servers_need_is_installed,
    arithmetic_is_ours_on_engines_of_ours,
    likeliest_tokens_are_seen_in_this_process,
)
