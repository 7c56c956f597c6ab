"""Two ranks on one accelerator: asleep they leave it empty, awake they go on as if nothing had been."""

import numpy as np
import pytest
import torch
from tests.backends.fsdp.gpu_ranks import hosted, slept
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
DENSE = {**SIZES, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MOE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def written(folder, config):
    folder.mkdir()
    LocalModel(
        hf.init_random(spec_from_config(config), seed=0, device="cpu", dtype=torch.bfloat16), config=config
    ).save(folder)
    return str(folder)


@pytest.mark.parametrize("tensor", [1, 2], ids=["fsdp2", "tp2"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_team_asleep_leaves_the_gpu_and_goes_on_awake(tmp_path, config, tensor):
    for results in ranks(2, slept, written(tmp_path / "model", config), tensor):
        assert results["awake"] > 20 << 20
        assert results["asleep"] < results["awake"] / 100, results
        assert results["again"] <= results["awake"] * 1.01
        assert results["same"]
        assert results["metrics"] == results["wanted"]


def test_layers_on_the_host_give_the_step_of_layers_on_the_gpu(tmp_path):
    for results in ranks(2, hosted, written(tmp_path / "model", DENSE)):
        assert results["host on"] == {"cpu"} and results["gpu on"] == {"cuda"}
        assert results["host held"] < results["gpu held"] / 2
        for name in ("loss", "grad_norm", "entropy"):
            assert results["host"][name] == pytest.approx(results["gpu"][name], rel=1e-3, abs=1e-5)
        for name, wanted in results["gpu weights"].items():
            # Where a gradient is all rounding its sign may be another one, and Adam's first step goes by that alone.
            apart = np.abs(results["host weights"][name] - wanted)
            assert float(apart.max()) <= 2.1e-3 and float(apart.mean()) < 1e-4, name
