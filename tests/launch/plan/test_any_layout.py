"""A plan never ends in a traceback, and refuses what training refuses: over random layouts, models and backends."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.launch.small_config import furnish
from tests.launch.upstream.launch_lines import MODELS
from tests.tiers import examples

from miles.core.errors import UsageError
from miles.launch.main import main
from miles.launch.plan.render import as_json, as_text
from miles.launch.read_config import read
from miles.launch.rules.check import list_machine_problems
from miles.models.accounting.known_models import find_known_config

CHECKPOINTS = (
    "Qwen3-0.6B",
    "Qwen2.5-7B",
    "Qwen3-30B-A3B",
    "Qwen3-Next-80B-A3B",
    "Llama-3.1-8B",
    "GLM-4.5-Air",
    "DeepSeek-V3",
    "gpt-oss-20b",
    "MiniMax-M2",
    "Gemma-3-1B",
    *MODELS,
)
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64])
NUMBERS = {
    "--tensor-model-parallel-size": SIZES,
    "--context-parallel-size": SIZES,
    "--pipeline-model-parallel-size": SIZES,
    "--expert-model-parallel-size": SIZES,
    "--expert-tensor-parallel-size": SIZES,
    "--data-parallel-replicate-size": SIZES,
    "--actor-num-nodes": st.sampled_from([1, 2, 16]),
    "--actor-num-gpus-per-node": SIZES,
    "--rollout-num-gpus": SIZES,
    "--rollout-num-gpus-per-engine": SIZES,
    "--rollout-num-engines": SIZES,
    "--max-weight-staleness": st.sampled_from([0, 1]),
    "--lora-rank": st.sampled_from([0, 8]),
    "--global-batch-size": st.sampled_from([1, 64, 128]),
    "--engine-kv-tokens": st.sampled_from([1, 4096]),
}
CHOICES = {
    "--train-backend": st.sampled_from(["fsdp", "megatron"]),
    "--rollout-backend": st.sampled_from(["native", "served", "sglang"]),
    "--runtime": st.sampled_from(["local", "ray"]),
    "--device": st.sampled_from(["cpu", "cuda"]),
    "--dtype": st.sampled_from(["bfloat16", "float32"]),
    "--optimizer": st.sampled_from(["adam", "muon"]),
    "--advantage-estimator": st.sampled_from(["grpo", "ppo"]),
    "--recompute-granularity": st.sampled_from(["full", "selective"]),
}
SWITCHES = ("--sequence-parallel", "--colocate", "--fsdp-cpu-offload", "--optimizer-cpu-offload", "--use-kl-loss")


def lines() -> st.SearchStrategy[list[str]]:
    """Flags of a layout; most have several."""
    options = st.fixed_dictionaries({}, optional=NUMBERS | CHOICES)
    return st.builds(
        lambda chosen, switches: [
            *(word for flag, value in chosen.items() for word in (flag, str(value))),
            *sorted(switches),
        ],
        options,
        st.sets(st.sampled_from(SWITCHES), max_size=3),
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    furnish(folder)
    for name in CHECKPOINTS:
        (folder / name).mkdir()
        config: dict[str, Any] = dict(MODELS.get(name) or find_known_config(name) or {})
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def find_problems(command: Any, words: list[str]) -> list[str]:
    """The sentences a command ends with; those of a plan include what this machine lacks."""
    try:
        config, plan, origins = read(command, words)
    except UsageError as error:
        return list(error.problems)
    assert as_text(config, plan, origins, every=True) and as_json(config, plan, origins)
    return list_machine_problems(config) if command == "plan" else []


UNEQUAL_EXPERTS = shlex.split(
    "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1"
)
NO_FUNCTION_SCOPE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(suppress_health_check=NO_FUNCTION_SCOPE, max_examples=examples(200), deadline=None)
@example("Qwen3-30B-A3B", UNEQUAL_EXPERTS)
@example("Qwen3-0.6B", ["--expert-tensor-parallel-size", "2", "--actor-num-nodes", "2"])
@given(st.sampled_from(CHECKPOINTS), lines())
def test_a_plan_and_a_run_refuse_the_same_in_sentences(
    world: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: list[str]
):
    monkeypatch.chdir(world)
    line = ["good.toml", "--hf-checkpoint", model, *words]
    planned, trained = find_problems("plan", line), find_problems("train", line)
    assert all(problem.endswith((".", "?")) for problem in planned + trained)
    # Without a problem of the line itself, a plan is printed and lists what training here is refused for.
    assert set(planned) <= set(trained) and bool(planned) == bool(trained)


@settings(suppress_health_check=NO_FUNCTION_SCOPE, max_examples=examples(100), deadline=None)
@example("Qwen3-30B-A3B", UNEQUAL_EXPERTS)
@given(st.sampled_from(CHECKPOINTS), lines())
def test_the_requirements_of_a_model_are_printed_or_refused_in_sentences(
    world: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: list[str]
):
    monkeypatch.chdir(world)
    assert main(["plan", model, *words]) in (0, 2)
