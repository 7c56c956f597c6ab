"""Checkpoints with a vision tower, in which text alone is computed, saved and converted."""

import json

import pytest
import torch
from tests.models.oracle import hf_logits, our_logits, relative, tokens_of
from tests.models.small_families.small import SMALL
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import stored_tensors

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
TEXT = SMALL | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "sliding_window_pattern": 2}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=dict(TEXT), vision_config=SiglipVisionConfig(**VISION), mm_tokens_per_image=1, image_token_index=52
    )
    config._attn_implementation = "eager"
    made = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.25 * torch.randn_like(parameter))
    return made.eval()


def test_the_text_model_of_a_model_with_a_vision_tower_is_loaded_and_equals_it(model, tmp_path):
    model.save_pretrained(tmp_path)
    decoder = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    assert [layer.mixer.window for layer in decoder.spec.layers] == [9, None]
    sequences = tokens_of((5, 1, 40), vocab=50)
    with torch.no_grad():
        assert relative(our_logits(decoder, sequences), hf_logits(model, sequences)) <= 1e-5


def test_a_saved_model_has_its_vision_tower_and_keeps_the_head_behind_it(model, tmp_path):
    model.save_pretrained(tmp_path / "theirs")
    decoder = hf.load(tmp_path / "theirs", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    hf.export(decoder, tmp_path / "ours", like=tmp_path / "theirs", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "ours").state_dict()
    assert set(again) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor if ".head." in name else tensor * 1.5), name


def test_a_tower_is_read_by_its_published_names_and_by_those_transformers_gives_it(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    decoder = hf.load(tmp_path / "plain", device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "published", like=tmp_path / "plain")
    names = set(stored_tensors(tmp_path / "published"))
    assert {name.split(".")[1] for name in names if name.startswith("vision_tower.")} == {"vision_model"}
    assert not any(".vision_model." in name for name in stored_tensors(tmp_path / "plain"))
    again = hf.load(tmp_path / "published", device="cpu", dtype=torch.float32).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in decoder.state_dict().items())


def test_a_converted_text_model_keeps_its_vision_tower_wide(model, tmp_path):
    model.save_pretrained(tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "fp8"), "--format", "fp8_channel"]) == 0
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert any("vision_tower" in name and name.endswith("q_proj") for name in config["ignore"])
    assert main(["convert", str(tmp_path / "fp8"), str(tmp_path / "wide"), "--format", "float32"]) == 0
    again = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "wide").state_dict()
    for name, tensor in model.state_dict().items():
        pictures = "vision_tower" in name or "multi_modal_projector" in name
        assert relative(again[name], tensor) <= (0 if pictures else 2**-4), name
