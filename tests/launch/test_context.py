"""A model with short and long rotary factors takes those of the context a run allows, in both planes alike."""

import json
from pathlib import Path

import pytest
import torch
from tests.models.oracle import hf_logits, hf_model, our_logits, relative, tokens_of

from miles.config.cli import parse
from miles.launch.build.models import load_model, read_policy
from miles.launch.commands import demo_task
from miles.launch.config import Config
from miles.models.checkpoint.safetensors_io import copy_tokenizer_files


@pytest.mark.parametrize(("flags", "length"), [([], 256), (["--rollout-max-context-len", "40"], 40)])
def test_a_run_takes_the_factors_of_its_context_throughout(flags: list[str], length: int, tmp_path: Path):
    model = hf_model("phi3 longrope, short", max_position_embeddings=256)
    model.config.rope_parameters["original_max_position_embeddings"] = 40
    model.config.architectures = ["Phi3ForCausalLM"]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["original_max_position_embeddings"] = 40
    (tmp_path / "config.json").write_text(json.dumps(config))
    demo_task.write_checkpoint(tmp_path / "demo", moe=False, seed=0)
    copy_tokenizer_files(tmp_path / "demo", tmp_path)
    asked = parse(Config, ["--hf-checkpoint", str(tmp_path), "--device", "cpu", *flags], ()).config
    assert asked is not None
    policy = read_policy(asked)
    assert policy.spec.max_positions == length
    decoder = load_model(policy)
    assert decoder.spec == policy.spec  # the engine's and the trainer's
    theirs = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    # transformers looks at each sequence's own length; these are on the run's side of the border.
    sequences = tokens_of((41, 60, 90) if length == 256 else (3, 20, 40))
    with torch.no_grad():
        assert relative(our_logits(decoder, sequences), hf_logits(theirs, sequences)) <= 1e-5
