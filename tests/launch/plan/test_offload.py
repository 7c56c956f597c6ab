"""Offload of the optimizer while engines sample: by published size and GPU, and the same for run, plan and recipes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launch.small_config import furnish

from miles.cluster.platform import Platform
from miles.launch.build.models import _offloads_optimizer
from miles.launch.config import Config
from miles.launch.plan.offload import USABLE, OffloadChoice, choose_offload
from miles.launch.plan.plan import Plan
from miles.launch.plan.render import as_json, as_text
from miles.launch.read_config import read
from miles.launch.recipes.catalog import Hardware
from miles.launch.recipes.fit import estimate_fit
from miles.models.accounting.known_models import load_known_models
from miles.models.resolve import resolve_spec
from miles.train.dp_group import SINGLE_RANK

GB = 10**9


@pytest.fixture
def read_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)

    def read_words(name: str, *words: str) -> tuple[Config, Plan, Any]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **load_known_models()[name]}))
        return read("plan", ["good.toml", "--hf-checkpoint", name, "--device", "cuda", *words])

    return read_words


def choose(config: Config, plan: Plan, memory: int | None) -> OffloadChoice:
    return choose_offload(config, plan, resolve_spec(config.models.hf_checkpoint, "auto"), memory)


@pytest.mark.parametrize(
    ("name", "gb", "offloads"),
    [
        ("Qwen3-0.6B", 141, False),
        ("Qwen3-1.7B", 141, False),
        ("Qwen3-4B", 141, False),
        ("Qwen3-8B", 141, True),
        ("Qwen3-14B", 141, True),
        ("Qwen3-30B-A3B", 141, True),
        ("Qwen3-0.6B", 80, False),
        ("Qwen3-1.7B", 80, False),
        ("Qwen3-4B", 80, True),
        ("Qwen3-8B", 80, True),
        ("Qwen3-14B", 80, True),
        ("Qwen3-30B-A3B", 80, True),
    ],
)
def test_the_optimizer_stays_where_it_fits_beside_the_engine(read_run, name: str, gb: int, offloads: bool):
    config, plan, _ = read_run(name)
    choice = choose(config, plan, gb * GB)
    assert choice.offloads is offloads and choice.is_automatic and choice.sampling is not None
    assert (choice.sampling <= USABLE * gb * GB) is not offloads
    # What is left on the device fits in any case: the KV cache takes at most half of what the weights leave.
    assert choice.sampling - (choice.optimizer if offloads else 0) <= USABLE * gb * GB


@pytest.mark.parametrize("words", [(), ("--engine-kv-tokens", "65536"), ("--use-kl-loss",), ("--optimizer", "muon")])
def test_more_memory_never_makes_it_offload(read_run, words: Sequence[str]):
    config, plan, _ = read_run("Qwen3-4B", *words)
    found = [choose(config, plan, gb * GB).offloads for gb in range(40, 400, 10)]
    assert found == sorted(found, reverse=True) and found[0] and not found[-1]


def test_what_else_is_held_while_engines_sample_counts(read_run):
    plain = choose(*read_run("Qwen3-4B")[:2], 141 * GB)
    assert not plain.offloads and plain.sampling is not None
    with_reference = choose(*read_run("Qwen3-4B", "--use-kl-loss")[:2], 141 * GB)
    assert with_reference.offloads and with_reference.sampling is not None
    assert with_reference.sampling - plain.sampling == pytest.approx(8.04e9, rel=1e-3)
    small_cache = choose(*read_run("Qwen3-8B", "--engine-kv-tokens", "32768")[:2], 141 * GB)
    assert not small_cache.offloads and small_cache.sampling is not None
    assert small_cache.sampling == pytest.approx(16.4e9 + 98.3e9 + 32768 * 147456, rel=1e-2)


def test_options_come_before_the_choice(read_run):
    for words, offloads in (
        (("--offload-train",), True),
        (("--no-offload-train",), False),
        (("--offload",), True),
        (("--max-weight-staleness", "1"), False),
        (("--fsdp-cpu-offload", "--actor-num-gpus-per-node", "2", "--offload-train"), False),
    ):
        config, plan, _ = read_run("Qwen3-4B", *words)
        for memory in (80 * GB, 1000 * GB):
            choice = choose(config, plan, memory)
            assert (choice.offloads, choice.is_automatic) == (offloads, False), words


def test_a_small_optimizer_stays_also_beside_memory_that_is_not_planned(read_run):
    for name, words, offloads in (
        ("Qwen3-0.6B", ("--rollout-backend", "sglang"), False),
        ("Qwen3-4B", ("--rollout-backend", "sglang"), True),
    ):
        config, plan, _ = read_run(name, *words)
        assert choose(config, plan, 141 * GB).offloads is offloads
    config, plan, _ = read_run("Qwen3-4B")
    assert choose(config, replace(plan, num_policies=2), 141 * GB).offloads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu(Platform):
    free: int

    def free_bytes(self) -> int:
        return self.free


class _Ranks(type(SINGLE_RANK)):
    """Ranks of which another one has said ``names``."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def union_names(self, own: Sequence[str]) -> list[str]:
        return sorted({*own, *self.names})


def test_the_run_the_plan_and_recipes_choose_the_same(read_run):
    hardware = Hardware(name="1xH200", nodes=1, gpus_per_node=1, gpu_gb=141, host_gb=1000)
    for name, offloads, text in (("Qwen3-4B", False, "on the GPU"), ("Qwen3-8B", True, "in host memory")):
        config, plan, origins = read_run(name)
        fit = estimate_fit(config, hardware)
        assert fit.offload == choose(config, plan, 141 * GB) and fit.offload.offloads is offloads
        printed = as_text(config, plan, origins, every=False, gpu="H200")
        assert f"optimizer {text} while engines sample: {fit.offload.why}" in printed
        planned = json.loads(as_json(config, plan, origins, gpu="H200"))["fit"]["offload"]
        assert planned == {"offloads": offloads, "why": fit.offload.why}
        device = torch.device("cuda")
        gpu = _Gpu(kind="cuda", device=device, name="NVIDIA H200", memory_bytes=150 * GB, free=100 * GB)
        policy: Any = SimpleNamespace(folder=Path(name), platform=gpu)
        assert _offloads_optimizer(config, plan, policy, SINGLE_RANK) is offloads


def test_a_rank_whose_device_is_taken_by_others_makes_all_offload(read_run):
    config, plan, _ = read_run("Qwen3-4B")
    device = torch.device("cuda")
    gpu = _Gpu(kind="cuda", device=device, name="NVIDIA H200", memory_bytes=150 * GB, free=100 * GB)
    policy: Any = SimpleNamespace(folder=Path("Qwen3-4B"), platform=gpu)
    assert not _offloads_optimizer(config, plan, policy, _Ranks())
    assert _offloads_optimizer(config, plan, policy, _Ranks("short"))
    taken: Any = SimpleNamespace(folder=Path("Qwen3-4B"), platform=replace(gpu, free=40 * GB))
    assert _offloads_optimizer(config, plan, taken, _Ranks())


def test_the_choice_needs_no_torch():
    line = "import miles.launch.plan.offload, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True)
