"""Launch lines in upstream's words, from launch_lines.txt, and the folders they point at."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.models.accounting.known_models import find_known_config

_FILE = Path(__file__).with_name("launch_lines.txt")
_LINE = re.compile(r"(?P<name>[^ ]+) \[(?P<model>[^]]+)\]: (?P<words>.*?)(?: missing (?P<missing>.*))?")
MODELS: dict[str, dict[str, Any]] = {
    "GLM-4-9B": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 151552,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"original_max_position_embeddings": 4096}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Llama-3.2-3B": {"rope_scaling": _LLAMA3 | {"factor": 32.0}},
    "Llama-3.1-8B": {"rope_scaling": _LLAMA3 | {"factor": 8.0}},
    "DeepSeek-V3": {"rope_scaling": _YARN},
}
"""Keys of config.json that the published sizes leave out."""


@dataclass(frozen=True)
class LaunchLine:
    """A line, the model it is for, and the feature because of which it is refused."""

    name: str
    model: str
    words: tuple[str, ...]
    missing: str | None


def read_launch_lines() -> list[LaunchLine]:
    """Every line, with its arrays expanded."""
    arrays: dict[str, str] = {}
    lines: list[LaunchLine] = []
    for text in _FILE.read_text(encoding="utf-8").splitlines():
        if text and not text.startswith("#"):
            expanded = re.sub(r"\$(\w+)", lambda found: arrays[found[1]], text)
            if found := _LINE.fullmatch(expanded):
                words = tuple(shlex.split(found["words"].replace('"', '\\"')))
                lines.append(LaunchLine(found["name"], found["model"], words, found["missing"]))
            else:
                name, _, value = expanded.partition(" = ")
                arrays[name] = value
    return lines


def write_files(folder: Path, model: str) -> None:
    """The model's config.json and the data that lines name."""
    import pyarrow
    import pyarrow.parquet

    (folder / "models" / model).mkdir(parents=True)
    config = dict(MODELS.get(model) or find_known_config(model) or {}) | OVERRIDES.get(model, {})
    (folder / "models" / model / "config.json").write_text(json.dumps(config))
    (folder / "data" / "gsm8k").mkdir(parents=True)
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": "1 + 1 = ?"}], "label": "2"}
    row["messages"] = [*row["prompt"], {"role": "assistant", "content": "2"}]
    for name in ("dapo-math-17k", "aime-2024", "openhermes"):
        (folder / "data" / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 128)
    for name in ("train", "test"):
        table = pyarrow.Table.from_pylist([row] * 64)
        pyarrow.parquet.write_table(table, folder / "data" / "gsm8k" / f"{name}.parquet")
