"""docs/combinations.md: which features may be combined, pair by pair, as the rules of ``miles plan`` say it."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.rules.check import check_rules

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
SIZES = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256} | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
FEATURES = {
    "LoRA": "--lora-rank 8",
    "unmerged LoRA": "--lora-rank 8 --no-lora-merge",
    "MoE": "--hf-checkpoint moe",
    "routing replay": "--hf-checkpoint moe --use-rollout-routing-replay",
    "indexer replay": "--hf-checkpoint sparse --use-rollout-indexer-replay",
    "FSDP ranks": "--actor-num-gpus-per-node 4",
    "tensor parallel": "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2",
    "context parallel": "--actor-num-gpus-per-node 4 --context-parallel-size 2",
    "expert parallel": "--hf-checkpoint moe --actor-num-gpus-per-node 4 --expert-model-parallel-size 2",
    "Megatron": "--train-backend megatron --actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2",
    "torch_dist checkpoints": "--train-backend megatron --actor-num-gpus-per-node 4 --ckpt-format torch_dist",
    "transformers models": "--model-impl transformers",
    "asynchronous": "--max-weight-staleness 2",
    "partial rollout": "--over-sampling-batch-size 24 --partial-rollout",
    "exact parity": "--parity exact",
    "FP8 training": "--train-precision fp8",
    "FP8 rollout": "--rollout-precision fp8",
    "INT4 training": "--train-precision int4_g32",
    "served engines": "--rollout-backend served",
    "engine tensor parallel": "--rollout-num-gpus-per-engine 2 --rollout-backend served",
    "SGLang": "--rollout-backend sglang",
    "speculative decoding": "--speculative-algorithm ngram",
    "draft training": "--draft-train eagle3",
    "trained draft head": "--draft-train eagle3 --speculative-algorithm eagle3",
    "Ray": "--runtime ray --rollout-backend served",
    "elastic": "--elastic --max-weight-staleness 1 --rollout-backend served --actor-num-gpus-per-node 4 "
    "--rollout-num-gpus 4",
    "critic (PPO)": "--advantage-estimator ppo",
    "KL reference": "--use-kl-loss --kl-loss-coef 0.01",
    "reference updates": "--use-kl-loss --kl-loss-coef 0.01 --ref-update-interval 5 --save-interval 5",
    "distillation": "--use-opd --opd-teacher-load model",
    "SFT": "--loss-type sft_loss --no-rm-type --n-samples-per-prompt 1",
    "multi-turn tools": "--custom-generate-function-path multi_turn --generate-tools calculator --apply-chat-template",
    "agents": "--custom-agent-function-path mine.py:agent --apply-chat-template",
    "several policies": '--policies {"actor":{},"other":{}} --custom-cast-function-path solver_verifier '
    "--apply-chat-template",
    "dynamic sampling": "--dynamic-sampling-filter-path nonzero_std",
    "Muon": "--optimizer muon",
    "8-bit optimizer": "--optimizer-state-dtype int8",
    "optimizer offload": "--optimizer-cpu-offload",
    "asynchronous save": "--async-save",
    "importance sampling": "--use-tis",
    "vision tower": "--hf-checkpoint vision",
    "frozen vision tower": "--hf-checkpoint vision --freeze-vision-tower --max-patches-per-gpu 16384",
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("combinations")
    furnish(folder)
    for name in ("model", "moe", "vision", "sparse"):
        config = folder / name / "config.json"
        if name in ("model", "moe"):
            config.write_text(json.dumps(json.loads(config.read_text()) | SIZES))
        tensors = {"lm_head.weight": torch.zeros(1), "model.layers.0.self_attn.q_proj.weight": torch.zeros(1, 1)}
        save_file(tensors, folder / name / "model.safetensors")
    (folder / "mine.py").write_text("async def agent(base_url, prompt, request_kwargs, metadata): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def list_problems(line: str) -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, "plan")]


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_accepted_alone(name: str):
    assert list_problems(FEATURES[name]) == []


def write_page() -> str:
    refused = {
        (first, second): problems
        for first, second in combinations(FEATURES, 2)
        if (problems := list_problems(f"{FEATURES[first]} {FEATURES[second]}"))
    }
    lines = [
        "# Combinations of features",
        "",
        f"{len(FEATURES)} features, each with every other: {len(list(combinations(FEATURES, 2)))} pairs. The rules of "
        f"`miles plan` and `miles train` refuse {len(refused)} of them, with the sentences below; all others are "
        "accepted. This page is generated from the rules (`make regenerate`), for models whose sizes are multiples of "
        "256: those of others may not allow blocks of FP8 or shards of tensor parallelism. That a pair is accepted "
        "does not say that a test runs it: the pages of the features name their tests.",
        "",
        "| feature | flags |",
        "|---|---|",
        *(f"| {name} | `{flags}` |" for name, flags in FEATURES.items()),
        "",
        "## Refused pairs",
        "",
        "| feature | with | why |",
        "|---|---|---|",
        *(f"| {first} | {second} | {' '.join(problems)} |" for (first, second), problems in refused.items()),
    ]
    return "\n".join(lines) + "\n"


def test_the_generated_page_of_combinations_is_up_to_date(regenerate: bool):
    page = write_page()
    if regenerate:
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "run make regenerate"
