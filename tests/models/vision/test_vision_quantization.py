"""Quantized checkpoints of vision-language models: the tower keeps its dtype."""

import json

import torch
from tests.models.oracle import relative
from tests.models.vision.small_vision import hf_vision_logits, our_vision_logits, prompts_of, vision_model

from miles.launch.main import main
from miles.models.checkpoint import hf


def test_a_converted_model_keeps_its_tower_and_is_read_back(tmp_path):
    model, prompts = vision_model("qwen3_vl"), prompts_of("qwen3_vl")
    model.save_pretrained(tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "fp8"), "--format", "fp8_channel"]) == 0
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    ignored = config["ignore"]
    for name, tensor in model.state_dict().items():
        if name.startswith("model.visual.") and tensor.dim() == 2 and "pos_embed" not in name:
            assert name.removesuffix(".weight") in ignored, name
    wide, narrow = (hf.load(tmp_path / name, device="cpu", dtype=torch.float32) for name in ("in", "fp8"))
    narrow_params = dict(narrow.named_parameters())
    for name, parameter in wide.named_parameters():
        assert torch.equal(parameter, narrow_params[name]) == (
            name.startswith("vision.") or "norm" in name or name in ("embedding.weight", "lm_head.weight")
        ), name
    with torch.no_grad():
        assert relative(our_vision_logits(narrow, prompts), hf_vision_logits(model, prompts)) <= 0.3
