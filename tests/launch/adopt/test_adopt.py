"""`miles adopt`: from a checkpoint to a recipe; the small model it makes is compared with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.oracle import hf_model
from tests.rollout.tiny import save_tokenizer

from miles.core.errors import UsageError
from miles.launch.adopt.command import find_definition, write_random_model
from miles.launch.adopt.layout import choose_layout, list_hardware, list_tasks, read_shared_layers
from miles.launch.adopt.small_config import shrink_config
from miles.launch.main import main
from miles.launch.recipes.catalog import parse_recipe, read_recipe
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import parameter_count
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec

# Of the published shapes, as their configs name their types.
TYPES = {
    "Qwen3-8B": "qwen3",
    "Qwen3-30B-A3B": "qwen3_moe",
    "Llama-3.1-8B": "llama",
    "Gemma-3-1B": "gemma3_text",
    "gpt-oss-20b": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
    "GLM-4.5": "glm4_moe",
    "GLM-5": "glm_moe_dsa",
    "Qwen3-Next-80B-A3B": "qwen3_next",
    "Nemotron-3-Nano-30B-A3B": "nemotron_h",
    "Phi-4": "phi3",
    "Mixtral-8x7B-v0.1": "mixtral",
    "Hunyuan-A13B-Instruct": "hunyuan",
    "LFM2-8B-A1B": "lfm2_moe",
    "Mistral-Small-4-119B-2603": "mistral4",
    "GLM-4.1V-9B-Thinking": "glm4v",
    "Qwen2-VL-7B-Instruct": "qwen2_vl",
    "Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_moe",
}
# A reward that differs between trajectories of random tokens.
REWARD = """
async def score(prompt, trajectory):
    from miles.core.types import Reward

    return Reward(value=float(trajectory.branches[0][-1].tokens.sum() % 7))
"""
# The first published shape of each other family, which takes longer; transformers has no class for the two below.
FAMILY_OF = {name: spec_from_config(config).family for name, config in load_known_models().items()}
WITHOUT_CLASS = {"MiMo-7B-RL": "mimo", "Step-3.5-Flash": "step3p5"}
SLOWER = {
    name: family
    for family, name in {family: name for name, family in reversed(FAMILY_OF.items())}.items()
    if family not in {FAMILY_OF[name] for name in (*TYPES, *WITHOUT_CLASS)}
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": TYPES.get(name, FAMILY_OF[name]),
        "dtype": "bfloat16",
        **load_known_models()[name],
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Of a model with a tower mostly the language model alone is made small; tests of parity below make the others.
@pytest.mark.parametrize(
    "name", [name for name, config in load_known_models().items() if "vision_config" not in config]
)
def test_a_small_config_has_every_kind_of_layer_and_few_parameters(name: str):
    large, small = (
        spec_from_config(load_known_models()[name]),
        spec_from_config(shrink_config(load_known_models()[name])),
    )
    assert parameter_count(small) < 20e6 < parameter_count(large)
    assert small.family == large.family

    def list_kinds(layers: Any) -> set[tuple[type, type]]:
        return {(type(layer.mixer), type(layer.ffn)) for layer in layers}

    assert list_kinds(small.layers) == list_kinds(large.layers)


@pytest.mark.parametrize("name", [*TYPES, *(pytest.param(name, marks=pytest.mark.extended) for name in SLOWER)])
def test_a_new_checkpoint_becomes_a_recipe_with_parity(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, file = write_config(tmp_path / name, name), tmp_path / "new.toml"
    assert main(["adopt", str(folder), "--hardware", "16x8xH200", "--output", str(file), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "native and transformers are within 0.0001" in shown and "served by  the definition of" in shown
    recipe = read_recipe(file, tmp_path)
    assert recipe.tried == "planned only" and recipe.hardware is not None and recipe.hardware.num_gpus == 128
    assert parse_recipe(recipe).models.hf_checkpoint == str(folder)


@pytest.mark.parametrize("name", WITHOUT_CLASS)
def test_what_transformers_has_no_class_for_is_not_measured_but_has_a_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, file = write_config(tmp_path / name, name), tmp_path / "new.toml"
    assert main(["adopt", str(folder), "--hardware", "16x8xH200", "--output", str(file), "--device", "cpu"]) == 1
    assert "NOT measured: no small model could be made (transformers has no " in capsys.readouterr().out
    assert file.is_file()


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Hunyuan-A13B-Instruct", "Mistral-Small-4-119B-2603", "LFM2-8B-A1B", "Gemma-4-31B"])
def test_the_recipe_of_a_tiny_checkpoint_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Day 0 as a whole: a checkpoint that transformers saved, parity of its own weights, and two steps of training."""
    folder, rows = tmp_path / "tiny", tmp_path / "rows.jsonl"
    folder.mkdir()
    write_random_model({"model_type": TYPES.get(name, FAMILY_OF[name]), **load_known_models()[name]}, folder)
    save_tokenizer(folder)
    rows.write_text("".join(json.dumps({"question": f"{i} + 1", "answer": f"#### {i + 1}"}) + "\n" for i in range(8)))
    flags = ["--hardware", "1x24GB", "--task", "gsm8k_grpo", "--output", str(tmp_path / "a.toml"), "--device", "cpu"]
    assert main(["adopt", str(folder), *flags]) == 0
    assert "of the checkpoint's own weights" in capsys.readouterr().out
    sizes = ["--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--eval-interval", "9"]
    limits = ["--rollout-max-response-len", "8", "--rollout-max-prompt-len", "120", "--rollout-max-context-len", "128"]
    data = ["--prompt-data", str(rows), "--eval-prompt-data", "test", str(rows), "--no-apply-chat-template"]
    (tmp_path / "reward.py").write_text(REWARD)
    more = ["--dynamic-sampling-filter-path", "keep_all", "--custom-rm-path", f"{tmp_path / 'reward.py'}:score"]
    data += ["--device", "cpu", "--save", str(tmp_path / "run")]
    assert main(["train", str(tmp_path / "a.toml"), *sizes, *limits, *data, *more]) == 0
    rows_of_run = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in rows_of_run if row["kind"] == "train"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["parity_mean_abs"] < 1e-5 and step["grad_norm"] > 0 for step in steps)


def test_the_language_model_alone_of_one_that_sees_images_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Llama 4, whose router returns scores before logits in transformers."""
    folder = write_config(tmp_path / "scout", "Llama-4-Scout-17B-16E")
    assert main(["adopt", str(folder), "--hardware", "16x8xH200", "--output", str(tmp_path / "a.toml")]) == 0
    shown = capsys.readouterr().out
    assert "layer 0: router" in shown and "native and transformers are within 0.0001" in shown


def test_a_checkpoint_with_weights_is_compared_with_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "real"
    hf_model("qwen3").save_pretrained(folder)
    flags = ["--hardware", "1x24GB", "--task", "gsm8k_grpo", "--output", str(tmp_path / "a.toml"), "--device", "cpu"]
    assert main(["adopt", str(folder), *flags]) == 0
    assert "of the checkpoint's own weights" in capsys.readouterr().out
    own = parse_recipe(read_recipe(tmp_path / "a.toml", tmp_path)).rollout  # this model has few positions
    assert (
        own.rollout_max_context_len == spec_from_config(json.loads((folder / "config.json").read_text())).max_positions
    )


def test_a_wrong_definition_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A definition that reads another base of the rotation than the config has."""
    folder = write_config(tmp_path / "m", "Qwen3-8B")

    def read_wrongly(folder: Path, impl: str) -> DecoderSpec:
        config = json.loads((folder / "config.json").read_text())
        return spec_from_config(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})

    monkeypatch.setattr("miles.launch.parity.command.resolve_spec", read_wrongly)
    assert main(["adopt", str(folder), "--output", str(tmp_path / "a.toml"), "--device", "cpu"]) == 1
    assert "first differ at layer 0: rotation" in capsys.readouterr().out


def test_a_model_without_a_definition_is_served_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from transformers import Olmo3Config, Olmo3ForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = tmp_path / "olmo"
    Olmo3ForCausalLM(Olmo3Config(vocab_size=64, max_position_embeddings=4096, **small)).save_pretrained(folder)
    flags = ["--hardware", "1x24GB", "--task", "gsm8k_grpo", "--output", str(tmp_path / "a.toml")]
    assert main(["adopt", str(folder), *flags]) == 0
    shown = capsys.readouterr().out
    assert "--model-impl transformers" in shown and "nothing to compare" in shown
    assert parse_recipe(read_recipe(tmp_path / "a.toml", tmp_path)).models.model_impl == "transformers"
    assert main(["adopt", str(folder), "--output", str(tmp_path / "b.toml")]) == 2  # eight GPUs
    assert "No layout fits 8xH100" in capsys.readouterr().err


def test_a_checkpoint_that_nothing_serves_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["OddForCausalLM"], "model_type": "odd", "auto_map": {"a": "b"}}'
    )
    with pytest.raises(UsageError, match="with --trust-remote-code"):
        find_definition(folder, trust_remote_code=False)
    assert main(["adopt", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_flags_are_checked_before_anything_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_config(tmp_path / "m", "Qwen3-8B")
    (tmp_path / "there.toml").write_text("")
    for flags, sentence in (
        (["--hardware", "3xAbacus"], f"--hardware 3xAbacus is not known; there are {', '.join(list_hardware())}"),
        (["--task", "chess"], f"--task chess is not known; there are {', '.join(list_tasks())}"),
        (["--output", str(tmp_path / "there.toml")], "exists already"),
        (["--weights", "real"], "needs the weights of"),
    ):
        output = [] if "--output" in flags else ["--output", str(tmp_path / "new.toml")]
        assert main(["adopt", str(folder), *output, *flags]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hardware", "note"),
    [
        ("Qwen3-0.6B", "1x24GB", "all weights are trained"),
        ("Mistral-7B-v0.3", "1x80GB", "all weights are trained, with the optimizer in host memory"),
        ("Qwen3-14B", "1x80GB", "adapters are trained over an INT4 base"),
        ("Qwen3-32B", "8xH100", "all weights are trained, with the optimizer in host memory, engines of 8 GPUs"),
        (
            "DeepSeek-V3",
            "16x8xH200",
            "FP8 engines on 4 of the nodes, all weights trained on the others, engines of 8 GPUs",
        ),
        pytest.param(
            "Qwen3.8-Flash-Next",  # its experts are too narrow for FP8 in blocks
            "16x8xH200",
            "engines on 4 of the nodes, all weights trained on the others, engines of 4 GPUs",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "Kimi-K2.5",
            "16x8xH200",
            "adapters are trained over INT4 experts, engines on 4 of the nodes, engines of 8 GPUs",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_quickest_layout_that_fits_is_chosen(name: str, hardware: str, note: str, tmp_path: Path):
    folder = write_config(tmp_path / name, name)
    spec = spec_from_config(load_known_models()[name])
    layout = choose_layout(folder, spec, read_shared_layers(hardware, "math_grpo"), "auto")
    assert layout.note == note
