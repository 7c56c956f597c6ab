"""``miles check``: a preflight check of a training run, without loading the model.

It proves in seconds what can be proven before a GPU is used: that every data set renders and is graded, that the disk
holds the checkpoints, that ports, devices and packages are there, and that no known trap is set in the environment.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles.core.errors import MilesError
from miles.core.media import Images
from miles.core.protocols import Completion, SamplingParams
from miles.core.types import Author, Prompt, Span, Status, Tokens, Version
from miles.launch.build.generation import Generation, build_generation
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.policies import read_policies
from miles.launch.build.prompts import build_prompt_check, read_held_out_set, read_training_parts
from miles.launch.commands.doctor import check_packages
from miles.launch.config import Config
from miles.launch.plan.hardware import count_accelerators
from miles.launch.plan.memory import format_bytes
from miles.launch.plan.plan import Plan
from miles.launch.plan.topology import get_world_size, is_remote
from miles.models.accounting.params import optimizer_bytes, weight_bytes
from miles.rollout.config import resolve_context_limit
from miles.rollout.sampling import build_training_sampling, resolve_prompt_limit

_PREVIEW_CHARS = 60
_MIN_OPEN_FILES = 4096
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of the report; ``problem`` is a sentence where the run would fail, ``warning`` where it may."""

    name: str
    text: str
    problem: str | None = None
    warning: str | None = None


def check(config: Config, plan: Plan) -> int:
    """Print every result; 0 when nothing would keep the run from starting, else 1."""
    results: list[CheckResult] = []
    for part in (
        _check_downloads,
        _check_packages,
        _check_devices,
        _check_environment,
        _check_disk,
        _check_ports,
        _check_data,
    ):
        for result in _run_part(part, config, plan):
            results.append(result)
            mark = "!" if result.problem else "?" if result.warning else " "
            print(f"{mark} {result.name.ljust(12)} {result.text}", flush=True)
    for warning in (result.warning for result in results if result.warning):
        print(f"warning: {warning}")
    problems = [result.problem for result in results if result.problem]
    for problem in problems:
        print(f"problem: {problem}")
    print(
        f"\nverdict: {'this run can start.' if not problems else f'{len(problems)} to fix before this run can start.'}"
    )
    return 1 if problems else 0


def _run_part(
    part: Callable[[Config, Plan], Iterator[CheckResult]], config: Config, plan: Plan
) -> Iterator[CheckResult]:
    try:
        yield from part(config, plan)
    except MilesError as error:
        yield CheckResult(name=part.__name__.removeprefix("_check_"), text="cannot be used", problem=str(error))


# -- machine --------------------------------------------------------------------------------


def _check_downloads(config: Config, plan: Plan) -> Iterator[CheckResult]:
    for download in plan.downloads:
        yield CheckResult(
            name="download", text=f"{download.name}: {format_bytes(download.size)} before training starts"
        )


def _check_packages(config: Config, plan: Plan) -> Iterator[CheckResult]:
    wanted = {
        "sglang": config.sglang.rollout_backend == "sglang"
        and not config.sglang.rollout_external_engine_addrs
        and config.sglang.sglang_python is None,
        "megatron-core": config.train.train_backend == "megatron",
        "ray": config.ray.runtime == "ray",
        "tensorboard": config.observe.use_tensorboard,
        "wandb": config.observe.use_wandb,
        "mlflow-skinny": config.observe.use_mlflow,
        "trackio": config.observe.use_trackio,
    }
    found = list(check_packages(needed=[name for name, needed in wanted.items() if needed]))
    problems = [finding.lacks for finding in found if finding.lacks]
    yield CheckResult(
        name="packages",
        text=", ".join(f"{finding.name} {finding.text}" for finding in found),
        problem=" ".join(problems) or None,
    )


def _check_devices(config: Config, plan: Plan) -> Iterator[CheckResult]:
    text = f"{plan.device} ({plan.device_why})"
    present = count_accelerators()
    ranks = config.cluster.actor_num_gpus_per_node
    problem = None
    if plan.device != "cpu" and config.ray.runtime != "ray" and present is not None and present < ranks:
        problem = (
            f"This machine shows {present} GPUs and --actor-num-gpus-per-node asks for {ranks}; lower it, or run with "
            "--runtime ray on a cluster."
        )
    yield CheckResult(name="device", text=f"{text}, {get_world_size(config)} trainer ranks", problem=problem)


def _check_environment(config: Config, plan: Plan) -> Iterator[CheckResult]:
    found = list(list_traps(config, plan, os.environ, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    if not found:
        yield CheckResult(name="environment", text="no known trap is set")
    for name, warning in found:
        yield CheckResult(name="environment", text=name, warning=warning)


def list_traps(config: Config, plan: Plan, environ: Mapping[str, str], open_files: int) -> Iterator[tuple[str, str]]:
    """Settings of the environment that are known to make such a run fail or slow, each with what to do."""
    proxy = next((name for name in _PROXIES if environ.get(name)), None)
    exempt = f"{environ.get('no_proxy', '')},{environ.get('NO_PROXY', '')}"
    if proxy and not any(host in exempt for host in ("127.0.0.1", "localhost", "*")):
        yield (
            proxy,
            f"{proxy} is set and no_proxy does not name 127.0.0.1: requests of SGLang or an agent to a server on this "
            "machine may go to the proxy; set no_proxy=127.0.0.1,localhost.",
        )
    allocator = next(
        (name for name in _ALLOCATORS if "expandable_segments:true" in environ.get(name, "").lower()), None
    )
    if allocator and plan.device != "cpu" and is_remote(config):
        yield (
            allocator,
            f"{allocator} has expandable_segments:True, whose memory CUDA IPC handles cannot share on every driver; "
            "unset it if weight updates over ipc fail.",
        )
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0") and plan.device != "cpu":
        yield "CUDA_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING makes every kernel launch wait; unset it unless you debug."
    if environ.get("NVIDIA_TF32_OVERRIDE", "0") not in ("", "0") and config.models.parity == "exact":
        yield (
            "NVIDIA_TF32_OVERRIDE",
            "NVIDIA_TF32_OVERRIDE rounds float32 matmuls, so --parity exact cannot hold; unset it.",
        )
    if environ.get("PYTHONOPTIMIZE", "") not in ("", "0"):
        yield "PYTHONOPTIMIZE", "PYTHONOPTIMIZE removes the assertions that guard a run; unset it."
    if 0 <= open_files < _MIN_OPEN_FILES and (is_remote(config) or config.agents.custom_agent_function_path):
        yield (
            f"{open_files} open files",
            f"At most {open_files} files may be open, and each request to a server is one; run ulimit -n 65536 first.",
        )


# -- disk and ports -------------------------------------------------------------------------


def _check_disk(config: Config, plan: Plan) -> Iterator[CheckResult]:
    spec = read_policies(config, plan).main.checkpoint.spec
    checkpoint = weight_bytes(spec, plan.dtype) + optimizer_bytes(spec, plan.dtype)
    count = count_checkpoints(plan.steps, config.schedule.save_interval, config.schedule.keep_checkpoints)
    folder = next(path for path in (plan.run_dir, *plan.run_dir.resolve().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    needed = checkpoint * count
    text = f"{format_bytes(free)} free in {folder}; {count} checkpoints of about {format_bytes(checkpoint)}"
    problem = None
    if needed > free:
        problem = (
            f"The checkpoints of this run take {format_bytes(needed)} and {folder} has {format_bytes(free)} free; give "
            "--keep-checkpoints, a larger --save-interval, or another --save."
        )
    if not os.access(folder, os.W_OK):
        problem = f"{folder} cannot be written to; choose another --save."
    yield CheckResult(name="disk", text=text, problem=problem)


def count_checkpoints(steps: int, interval: int | None, keep: int | None) -> int:
    """The most checkpoints that a run holds at a time: one is written before the oldest is removed.

    >>> count_checkpoints(10, 3, None), count_checkpoints(10, 3, 2), count_checkpoints(10, None, None)
    (4, 3, 1)
    """
    written = -(-steps // interval) if interval else 1
    return max(1, written if keep is None else min(written, keep + 1))


def _check_ports(config: Config, plan: Plan) -> Iterator[CheckResult]:
    port = config.agents.session_server_port
    if not config.agents.custom_agent_function_path or not port:
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((config.agents.session_server_host, port))
    except OSError as error:
        yield CheckResult(
            name="port",
            text=str(port),
            problem=f"--session-server-port {port} cannot be used ({error.strerror}); give a free one, or 0.",
        )
    else:
        yield CheckResult(name="port", text=f"{port} is free")


# -- data -----------------------------------------------------------------------------------


class _ScriptedEngine:
    """An engine (core.protocols.Engine) that replies with fixed tokens, so that a grader can be tried."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        reply = self._tokens[: sampling.max_new_tokens]
        span = Span(author=Author.POLICY, tokens=reply, logprobs=np.zeros(len(reply), np.float32), version=Version())
        return Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop")


def _check_data(config: Config, plan: Plan) -> Iterator[CheckResult]:
    policies = read_policies(config, plan)
    policy = policies.main.checkpoint
    generation = build_generation(policies.main.config, policy)
    limit = resolve_prompt_limit(config.rollout)
    rows = build_prompt_check(
        config,
        context=resolve_context_limit(config.rollout, policy.spec.max_positions),
        renders=generation.renders_prompts,
    )
    sets: list[tuple[str, Callable[[], Sequence[Prompt]]]] = []
    if config.rollout.prompt_data:

        def read_training() -> Sequence[Prompt]:
            parts = read_training_parts(config, policy.tokenizer, generation.render, limit, rows)
            return [prompt for part in parts for prompt in part.dataset.prompts]

        sets.append(("train data", read_training))
    for name, path in plan.eval_sets.items():
        sets.append(
            (
                f"eval {name}",
                lambda name=name, path=path: (
                    read_held_out_set(name, path, config, policy.tokenizer, generation.render, rows).prompts
                ),
            )
        )
    for name, read in sets:
        try:
            prompts = read()
            first = prompts[0]
            tokens = generation.render(first)
        except MilesError as error:
            yield CheckResult(name=name, text="cannot be used", problem=str(error))
            continue
        except IndexError:
            yield CheckResult(name=name, text="no prompt", problem=f"{name} has no prompt within the length limit.")
            continue
        text = policy.tokenizer.text([int(i) for i in tokens])
        yield CheckResult(
            name=name, text=f"{len(prompts):,} prompts; the first has {len(tokens)} tokens: {_shorten(text)}"
        )
        yield from asyncio.run(_grade(name, first, config, policy, generation))


async def _grade(
    name: str, prompt: Prompt, config: Config, policy: PolicyCheckpoint, generation: Generation
) -> list[CheckResult]:
    """Grade the label as a reply, plain and in a box: how a reply must look to earn a reward."""
    if generation.reward is None or prompt.label is None or generation.agents or generation.environments:
        return []
    scores: dict[str, float] = {}
    sampling = replace(build_training_sampling(config.rollout), max_new_tokens=1024)
    for reply in (prompt.label, f"\\boxed{{{prompt.label}}}"):
        engine = _ScriptedEngine(np.array(policy.tokenizer.encode(reply), np.int32))
        try:
            trajectory = await generation.generate(prompt, engine, sampling)
            # A small vocabulary may not spell the reply.
            trajectory = replace(trajectory, metadata={**trajectory.metadata, "text": reply})
            scored = trajectory.reward or await generation.reward(prompt, trajectory)
        except Exception as error:  # a reward function may raise anything
            problem = f"The reward of {name} cannot grade the reply {_shorten(reply)}: {error}"
            return [CheckResult(name="  reward", text="raises", problem=problem)]
        scores[reply] = scored.value
    text = ", ".join(f"{_shorten(reply)} scores {value:g}" for reply, value in scores.items())
    best = max(scores.values())
    warning = None
    if best <= 0:
        warning = (
            f"The label of the first prompt of {name} scores {best:g}, boxed or not: check --label-key and --rm-type, "
            "or ignore this if the grader wants another form."
        )
    elif scores[prompt.label] < best and "boxed" not in str(prompt.messages):
        warning = (
            f"The grader wants \\boxed{{}} and the first prompt of {name} does not ask for it: say so in a system "
            "prompt, or the reward may stay 0."
        )
    return [CheckResult(name="  reward", text=text, warning=warning)]


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return f'"{line if len(line) <= _PREVIEW_CHARS else line[: _PREVIEW_CHARS - 3] + "..."}"'
