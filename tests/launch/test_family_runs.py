"""The whole program on models of every mechanism: trained, saved, scored, talked to, killed and continued."""

import io
import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.launch.small_run import everything, flags, miles, write_inputs
from tests.models.oracle import hf_model
from tests.models.small_families.small import SMALL
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from miles.launch.main import main

# A word of the small inputs and its answer are about ten tokens: what narrows the view is made shorter than that.
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4},
    "deepseek v3": {},
    "gpt-oss": {"sliding_window": 4},
    "llama 4": {"attention_chunk_size": 4, "floor_scale": 4, "rope_parameters": None},
    "hybrid qwen3.5": {},
    "hybrid nemotron 3": {},
    "glm 5 shared choices": {"index_topk": 4},
}
MORE: dict[str, dict[str, Any]] = {
    "deepseek v2 in groups": {},
    "deepseek v3.2": {"index_topk": 4},
    "gemma3": {"sliding_window": 4},
    "glm": {},
    "glm4": {},
    "glm-4.5": {},
    "glm 4.7 flash": {},
    "hybrid nemotron 3 latent, in groups": {},
    "hybrid nemotron h": {},
    "hybrid qwen3 next": {},
    "hybrid qwen3.5 moe": {},
    "hybrid qwen4": {"indexer_budget": 4, "indexer_compress_ratio": 2},
    "minimax-m2": {},
    "ministral": {"sliding_window": 4},
    "mistral windowed": {"sliding_window": 4},
    "mixtral with a window": {"sliding_window": 4},
    "phi3": {"sliding_window": 4},
    "qwen2 moe": {},
    "smollm3": {},
}
FROZEN = ("e_score_correction_bias", ".indexer.")
"""What a gradient never reaches: it is loaded, published and saved, and stays as it is."""

COMMON = ("--device", "cpu", "--num-threads", "1", "--rollout-max-response-len", "6")


def ids_of(inputs):
    """Config values for a model with the small vocabulary."""
    config = json.loads((inputs / "config.json").read_text())
    ids = {key: config[key] for key in ("vocab_size", "eos_token_id", "max_position_embeddings")}
    return ids | {"bos_token_id": None, "pad_token_id": None}


def furnish(folder, kind):
    """The small inputs, its model replaced by one that transformers made."""
    inputs = write_inputs(folder)
    hf_model(kind, **(ids_of(inputs) | (KINDS | MORE)[kind])).save_pretrained(inputs)
    return inputs


def argv_of(inputs, run, *more, steps=2, updates=2):
    """The small run, with a checkpoint after every step and so many optimizer steps in each."""
    argv = flags(inputs, run, *more, steps=steps)
    for flag, value in (("--save-interval", 1), ("--num-steps-per-rollout", updates)):
        argv[argv.index(flag) + 1] = str(value)
    return argv


def trained(inputs, run, *more, **changes):
    done = miles("train", *argv_of(inputs, run, *more, **changes))
    assert done.returncode == 0, done.stderr
    return run


def rows(run):
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "train"]


def agrees(run):
    """Engine and trainer give every token the same log-prob, in every step that had fresh tokens to compare."""
    gaps = [row["parity_mean_abs"] for row in rows(run) if "parity_mean_abs" in row]
    return bool(gaps) and max(gaps) < 1e-5


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    made = {}

    def inputs(kind):
        if kind not in made:
            made[kind] = furnish(tmp_path_factory.mktemp("inputs"), kind)
        return made[kind]

    return inputs


@pytest.fixture(scope="module")
def calm(sources, tmp_path_factory) -> Callable[[str], Any]:
    """The run of a kind that was never stopped, made once."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = trained(sources(kind), tmp_path_factory.mktemp("calm") / "run")
        return made[kind]

    return run


def serves(inputs, checkpoint, capsys, monkeypatch):
    """The checkpoint is scored and talked to."""
    held_out = ("--eval-prompt-data", "heldout", str(inputs / "heldout.jsonl"), "--rm-type", "exact")
    assert main(["eval", str(checkpoint), *held_out, "--label-key", "label", "--apply-chat-template", *COMMON]) == 0
    assert "eval/heldout/reward" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\nfedcba\n"))
    assert main(["chat", str(checkpoint), *COMMON]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_a_model_is_trained_saved_scored_and_talked_to(sources, calm, kind, capsys, monkeypatch):
    inputs, run = sources(kind), calm(kind)
    assert len(rows(run)) == 2 and agrees(run)
    last = run / "checkpoints" / "step-000002"
    before, after = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).state_dict() for f in (inputs, last))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.isfinite().all()
        assert torch.equal(tensor, before[name]) == any(part in name for part in FROZEN), name
    serves(inputs, last, capsys, monkeypatch)


@pytest.mark.parametrize("kind", ["hybrid nemotron 3", "gpt-oss"])
def test_a_killed_run_continues_to_the_bit(sources, calm, kind, tmp_path):
    argv = argv_of(sources(kind), tmp_path / "run")
    killed = miles("train", *argv, kill_at="miles.train.optim.optimizer:Optimizer.step:4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = miles("train", *argv)
    assert again.returncode == 0, again.stderr
    found, wanted = everything(tmp_path / "run"), everything(calm(kind))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []


@pytest.mark.parametrize("kind", ["deepseek v3", "gpt-oss", "llama 4"])
def test_replayed_routing_is_the_routers_own_while_nothing_was_updated(sources, kind, tmp_path):
    run = trained(sources(kind), tmp_path / "run", "--use-rollout-routing-replay", updates=1, steps=3)
    assert agrees(run) and [row["routing_mismatch_ratio"] for row in rows(run)] == [0, 0, 0]


def test_planes_that_overlap_keep_states_and_parity(sources, tmp_path):
    tight = ("--engine-page-size", "4", "--engine-kv-tokens", "240", "--engine-prefill-chunk", "3")
    run = tmp_path / "run"
    argv = argv_of(sources("hybrid qwen3.5"), run, "--max-weight-staleness", "1", *tight, steps=4)
    argv[argv.index("--rollout-max-response-len") + 1] = "24"  # long enough for new weights to come in between
    done = miles("train", *argv)
    assert done.returncode == 0, done.stderr
    assert max(row["staleness"] for row in rows(run)) == 1 and agrees(run)


def test_a_quantised_checkpoint_is_trained_and_saved_without(tmp_path, capsys, monkeypatch):
    inputs = furnish(tmp_path / "inputs", "deepseek v3")
    tensors = load_file(inputs / "model.safetensors")
    for name in [name for name in tensors if "_proj." in name]:
        rows, columns = tensors[name].shape
        tensors[f"{name}_scale_inv"] = torch.full((-(-rows // 8), -(-columns // 16)), 0.5)
        tensors[name] = (2 * tensors[name]).to(torch.float8_e4m3fn)
    save_file(tensors, inputs / "model.safetensors")
    config = json.loads((inputs / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    (inputs / "config.json").write_text(json.dumps(config))
    run = trained(inputs, tmp_path / "run")
    last = run / "checkpoints" / "step-000002"
    assert agrees(run) and "quantization_config" not in json.loads((last / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in found.values())
    serves(inputs, last, capsys, monkeypatch)


@pytest.mark.slow
def test_a_text_model_beside_a_vision_tower_is_trained_and_the_tower_kept(tmp_path, capsys, monkeypatch):
    inputs = write_inputs(tmp_path / "inputs")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = SMALL | ids_of(inputs) | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
    vision = SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    torch.manual_seed(0)
    made = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=26)
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.25 * torch.randn_like(parameter))
    made.save_pretrained(inputs)
    run = trained(inputs, tmp_path / "run")
    last = run / "checkpoints" / "step-000002"
    found = Gemma3ForConditionalGeneration.from_pretrained(last, dtype=torch.float32).state_dict()
    assert agrees(run) and found.keys() == made.state_dict().keys()
    for name, tensor in made.state_dict().items():
        pictures = "vision_tower" in name or "multi_modal_projector" in name
        assert torch.equal(found[name], tensor) == pictures, name
    serves(inputs, last, capsys, monkeypatch)
