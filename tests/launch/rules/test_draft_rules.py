"""Options of draft training: accepted where they have an effect, and refused with a sentence elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.launch.small_config import furnish

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.rules.check import check_rules

GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_nextn_predict_layers": 1,
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    for name in ("model", "vision"):
        (tmp_path / name / "model.safetensors").write_bytes(b"")
    for name, tensor in (("glm", "model.layers.2.input_layernorm.weight"), ("plain", "model.norm.weight")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(GLM))
        save_file({tensor: np.zeros(32, np.float32)}, tmp_path / name / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("miles.launch.rules.training.find_spec", lambda _: object())


def list_problems(line: str) -> list[str]:
    result = parse(Config, line.split(), read_layers("good.toml"))
    return [*result.problems, *(p for p in check_rules(result, "plan") if "draft" in p or "mtp" in p)]


@pytest.mark.parametrize(
    "line",
    [
        "--draft-train eagle3 --draft-lr 1e-3 --draft-loss hard --draft-train-steps 2",
        "--hf-checkpoint glm --enable-mtp-training --mtp-num-layers 1 --mtp-loss-scaling-factor 0.2",
        "--hf-checkpoint glm --enable-mtp-training --train-backend megatron",
        "--hf-checkpoint glm --draft-train eagle3",
        "--draft-train eagle3 --train-backend megatron --pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "--mtp-num-layers 0",
        "--hf-checkpoint vision --draft-train eagle3",
        "--hf-checkpoint glm --draft-train mtp --rollout-backend sglang --sglang-speculative-algorithm NEXTN",
        "--draft-train eagle3 --lora-rank 4",
        "--draft-train eagle3 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "--draft-train eagle3 --context-parallel-size 2 --actor-num-gpus-per-node 2",
        "--draft-train eagle3 --speculative-algorithm eagle3 --actor-num-gpus-per-node 2",
        "--draft-train eagle3 --speculative-algorithm eagle3 --rollout-backend served",
        "--draft-train eagle3 --draft-load model --speculative-algorithm eagle3 --rollout-backend served",
    ],
)
def test_a_draft_that_can_be_trained_is_accepted(line: str):
    assert list_problems(line) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--draft-lr 1e-3", "--draft-lr needs --draft-train mtp or eagle3"),
        ("--hf-checkpoint glm --draft-train mtp --draft-load model", "--draft-load needs --draft-train eagle3"),
        ("--draft-train mtp", "MTP layers of a qwen3 model are not supported; use --draft-train eagle3"),
        ("--hf-checkpoint plain --enable-mtp-training", "plain has no MTP layers"),
        (
            "--hf-checkpoint glm --enable-mtp-training --mtp-num-layers 2",
            "--mtp-num-layers is 2, but glm has 1; set it to 1",
        ),
        (
            "--draft-train eagle3 --rollout-backend sglang --sglang-speculative-algorithm EAGLE3",
            "SGLang would draft with EAGLE3, whose weights none of its endpoints updates",
        ),
        (
            "--hf-checkpoint glm --draft-train mtp --rollout-backend sglang --sglang-speculative-algorithm NEXTN "
            "--update-weight-transport distributed",
            "SGLang updates the policy but not its MTP layers over a process group",
        ),
        (
            "--draft-train eagle3 --speculative-algorithm mtp",
            "--speculative-algorithm mtp and --draft-train eagle3 name different drafts",
        ),
    ],
)
def test_a_draft_that_cannot_be_trained_is_refused(line: str, sentence: str):
    (problem,) = list_problems(line)
    assert sentence in problem
