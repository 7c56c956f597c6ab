"""Layout of a model on hardware: the first of a list of layouts, quickest first, that passes the rules and fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from miles.config.cli import parse
from miles.config.files import Layer, read_layers
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.recipes.catalog import Hardware, find_recipes_folder, merge_about, read_hardware
from miles.launch.recipes.fit import RecipePlan, estimate_fit
from miles.launch.rules.engines import ENGINE_RULES, SERVER_RULES
from miles.launch.rules.model import MODEL_RULES
from miles.launch.rules.precision import PRECISION_RULES
from miles.launch.rules.training import TRAINING_RULES
from miles.models.resolve import ModelImpl
from miles.models.spec import DecoderSpec

_RULES = (*MODEL_RULES, *PRECISION_RULES, *ENGINE_RULES, *SERVER_RULES, *TRAINING_RULES)
_LEAST_TOKENS = 4096
Values = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layers of a recipe whose last one is the layout, what it is in words, and its plan."""

    layers: tuple[Layer, ...]
    note: str
    fit: RecipePlan


def list_hardware() -> dict[str, Path]:
    """The files of the hardware with GPUs that recipes are for, by its name."""
    files = {file: read_layers(str(file))[-1].about for file in (find_recipes_folder() / "hardware").glob("*.toml")}
    found = sorted((about["gpu_gb"] * about["nodes"], about["hardware"], file) for file, about in files.items())
    return {name: file for size, name, file in found if size}


def list_tasks() -> list[str]:
    """The tasks that a recipe can be for."""
    return sorted(file.stem for file in (find_recipes_folder() / "tasks").glob("*.toml"))


def read_shared_layers(hardware: str, task: str) -> tuple[Layer, ...]:
    """The layers that a recipe for this hardware and task includes; UsageError for names that do not exist."""
    known, tasks = {name.lower(): file for name, file in list_hardware().items()}, list_tasks()
    if hardware.lower() not in known:
        raise UsageError(f"--hardware {hardware} is not known; there are {', '.join(list_hardware())}.")
    if task not in tasks:
        raise UsageError(f"--task {task} is not known; there are {', '.join(tasks)}.")
    folder = find_recipes_folder()
    files = (folder / "base.toml", known[hardware.lower()], folder / "tasks" / f"{task}.toml")
    return tuple(layer for file in files for layer in read_layers(str(file)))


def choose_layout(folder: Path, spec: DecoderSpec, shared: Sequence[Layer], impl: ModelImpl) -> Layout:
    """The quickest layout of the model in ``folder`` that fits; UsageError says why the most frugal one does not."""
    about = merge_about(shared)
    hardware = read_hardware(Path("adopt"), about)
    assert hardware is not None, "the shared layers name the hardware"
    problems: list[str] = []
    for values, note in _iter_layouts(spec, shared, hardware, impl):
        own = Layer(label="adopt", values=values)
        result = parse(Config, (), (*shared, own))
        if result.problems or result.config is None:
            raise UsageError(result.problems)
        config = replace(result.config, models=replace(result.config.models, hf_checkpoint=str(folder)))
        problems = [problem for rule in _RULES for problem in rule(config)]
        if problems:
            continue
        fit = estimate_fit(config, hardware)
        problems = fit.list_problems(hardware)
        if not problems:
            return Layout(layers=(*shared, own), note=note, fit=fit)
    raise UsageError(
        f"No layout fits {hardware.name}; of the most frugal one: {'; '.join(problems).rstrip('.')}. Try another "
        f"--hardware: {', '.join(list_hardware())}."
    )


def _iter_layouts(
    spec: DecoderSpec, shared: Sequence[Layer], hardware: Hardware, impl: ModelImpl
) -> Iterator[tuple[Values, str]]:
    """Layouts, quickest first: all weights, then with the optimizer in host memory, then adapters alone."""
    context = _fit_context(spec, shared)
    longest = context["rollout"].get("rollout_max_context_len", 0) if context else 0
    sizes = (1,) if hardware.num_gpus == 1 else tuple(n for n in (1, 2, 4, 8) if n <= hardware.gpus_per_node)
    adapters: Values = {"lora": {"lora_rank": 32, "lora_alpha": 64.0}, "train": {"lr": 2e-5, "weight_decay": 0.0}}
    if spec.moe is not None:
        adapters["lora"]["exclude_modules"] = "experts"
    ways: list[tuple[Values, str]] = [
        ({}, "all weights are trained"),
        ({"train": {"optimizer_cpu_offload": True}}, "all weights are trained, with the optimizer in host memory"),
        *_split_nodes(hardware),
        (adapters, "adapters are trained"),
        (_merge(adapters, {"models": {"train_precision": "int4"}}), "adapters are trained over an INT4 base"),
        *_split_nodes_over_int4_experts(spec, hardware, adapters),
    ]
    impl_values: Values = {} if impl == "auto" else {"models": {"model_impl": impl}}
    has_table = any(layer.ngram is not None for layer in spec.layers)  # of n-grams, which FSDP gathers whole
    tensor = hardware.gpus_per_node if has_table and impl == "auto" else 1
    if tensor > 1:
        impl_values["parallel"] = {"tensor_model_parallel_size": tensor}
    for way, note in ways:
        for tokens in (None, max(_LEAST_TOKENS, longest)):
            limit: Values = {} if tokens is None else {"train": {"max_tokens_per_gpu": tokens}}
            for size in sizes:
                engines: Values = {} if size == 1 else {"cluster": {"rollout_num_gpus_per_engine": size}}
                text = note if size == 1 else f"{note}, engines of {size} GPUs"
                ranks = way.get("cluster", {}).get("actor_num_nodes", hardware.nodes) * hardware.gpus_per_node
                packs_all = way.get("models", {}).get("train_precision") == "int4"
                experts = {} if packs_all else _share_experts(spec, ranks // tensor)
                yield _merge(impl_values, context, experts, way, limit, engines), text


def _split_nodes(hardware: Hardware) -> list[tuple[Values, str]]:
    """With several nodes: engines on a quarter of them, with FP8 weights or wide, a step behind the trainer."""
    split, engines = _share_nodes(hardware), hardware.nodes // 4
    if not engines:
        return []
    offload: Values = {"train": {"optimizer_cpu_offload": True}}
    fp8: Values = {"models": {"rollout_precision": "fp8"}, "algo": {"use_tis": True}}
    return [
        (_merge(fp8, offload, split), f"FP8 engines on {engines} of the nodes, all weights trained on the others"),
        (_merge(offload, split), f"engines on {engines} of the nodes, all weights trained on the others"),
    ]


def _split_nodes_over_int4_experts(spec: DecoderSpec, hardware: Hardware, adapters: Values) -> list[tuple[Values, str]]:
    """With several nodes and experts: the most frugal layout, for models beyond half a trillion parameters."""
    split, engines = _share_nodes(hardware), hardware.nodes // 4
    if not engines or spec.moe is None:
        return []
    packed: Values = {"models": {"train_precision": "int4_g32", "quantize_experts_only": True}}
    note = f"adapters are trained over INT4 experts, engines on {engines} of the nodes"
    return [(_merge(adapters, packed, split), note)]


def _share_nodes(hardware: Hardware) -> Values:
    engines = hardware.nodes // 4
    return {
        "schedule": {"colocate": False, "max_weight_staleness": 1},
        "cluster": {
            "actor_num_nodes": hardware.nodes - engines,
            "rollout_num_gpus": engines * hardware.gpus_per_node,
        },
    }


def _share_experts(spec: DecoderSpec, ranks: int) -> Values:
    """Experts distributed over the ranks, as far as their number allows."""
    if spec.moe is None or ranks == 1:
        return {}
    size = gcd(spec.moe.num_experts, ranks)
    return {"parallel": {"expert_model_parallel_size": size}} if size > 1 else {}


def _fit_context(spec: DecoderSpec, shared: Sequence[Layer]) -> Values:
    """Shorter sequences where the model has fewer positions than the task wants."""
    config = parse(Config, (), shared).config
    assert config is not None, "every option has a default"
    r, most = config.rollout, spec.max_positions
    longest = r.rollout_max_context_len
    if longest is not None and longest <= most:
        return {}
    values: dict[str, Any] = {"rollout_max_context_len": most}
    if r.rollout_max_prompt_len is not None:
        prompt = min(r.rollout_max_prompt_len, most // 2)
        values |= {"rollout_max_prompt_len": prompt, "rollout_max_response_len": most - prompt}
    return {"rollout": values}


def _merge(*tables: Values) -> Values:
    merged: Values = {}
    for table in tables:
        for section, values in table.items():
            merged.setdefault(section, {}).update(values)
    return merged
