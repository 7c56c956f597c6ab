"""Options that a launch line of upstream implies, where it does not set them: upstream has other defaults.

Upstream always trains with Megatron on a Ray cluster and starts engines as servers. Here that is chosen where a line
needs it; the plan shows the flag as the origin.
"""

from collections.abc import Iterator
from typing import Any

from miles.config.files import Layer
from miles.config.provenance import DEFAULT, ParseResult
from miles.hooks.registry import ROLLOUT
from miles.launch.config import Config
from miles.launch.rules.paths import read_spec_or_none


def list_implied_options(result: ParseResult[Config]) -> list[Layer]:
    """A layer below all others for each option that is implied and has its default."""
    if result.config is None:
        return []
    layers: list[Layer] = []
    for name, value, why in _list_implied(result.config):
        if result.origins[name] == DEFAULT and name not in result.invalid:
            layers.append(Layer(label=why, values={name: value}))
    return layers


def _list_implied(c: Config) -> Iterator[tuple[str, Any, str]]:
    """(option, value, the flag that implies it)."""
    p, nodes = c.parallel, c.cluster.actor_num_nodes
    total, each = c.cluster.rollout_num_gpus, c.cluster.rollout_num_gpus_per_engine
    if p.pipeline_model_parallel_size > 1:
        yield "train_backend", "megatron", f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}"
    elif p.expert_tensor_parallel_size not in (None, p.tensor_model_parallel_size) and _has_experts(c):
        yield "train_backend", "megatron", f"--expert-tensor-parallel-size {p.expert_tensor_parallel_size}"
    if nodes > 1:
        yield "runtime", "ray", f"--actor-num-nodes {nodes}"
        yield "rollout_backend", "served", f"--actor-num-nodes {nodes}"
    elif total is not None and total != each and not c.sglang.rollout_external_engine_addrs:
        yield "rollout_backend", "served", f"--rollout-num-gpus {total}"
    if ROLLOUT.resolve_name(c.hooks.rollout_function_path) == "fully_async":
        yield "max_weight_staleness", 1, f"{ROLLOUT.flag} {c.hooks.rollout_function_path}"
    elif "--fully-async" in c.upstream.upstream_flags:
        yield "max_weight_staleness", 1, "--fully-async"


def _has_experts(c: Config) -> bool:
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    return spec is not None and spec.moe is not None
