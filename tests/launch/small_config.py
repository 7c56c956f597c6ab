"""A model config and some prompts for command lines, small and without weights."""

import json
from pathlib import Path

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SPARSE = QWEN3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000.0,
}
VISION = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 900,
    "video_token_id": 901,
    "vision_start_token_id": 902,
    "vision_end_token_id": 903,
    "tie_word_embeddings": True,
    "text_config": {
        **{name: value for name, value in QWEN3.items() if name not in ("architectures", "model_type", "head_dim")},
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 4, 4]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 14,
        "out_hidden_size": 96,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    },
}
RECIPE = """
hf_checkpoint = "model"
prompt_data = "data/train.jsonl"
rm_type = "math"
label_key = "label"
[rollout]
rollout_batch_size = 16
n_samples_per_prompt = 8
rollout_max_response_len = 64
[schedule]
num_rollout = 10
"""


def furnish(folder: Path) -> None:
    """A model, a mixture, one of sparse attention, one with a vision tower, one nobody knows, prompts, and a recipe."""
    odd = {"architectures": ["OddForCausalLM"]}
    for name, config in {"model": QWEN3, "moe": MOE, "sparse": SPARSE, "vision": VISION, "odd": odd}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "empty").mkdir()
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_text("")
    (folder / "data").mkdir()
    rows = "".join(json.dumps({"input": f"{i} + 1 = ?", "label": str(i + 1)}) + "\n" for i in range(40))
    for name in ("train", "held"):
        (folder / "data" / f"{name}.jsonl").write_text(rows)
    (folder / "data" / "notes.txt").write_text("no")
    (folder / "good.toml").write_text(RECIPE)
