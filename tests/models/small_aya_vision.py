"""A small Aya Vision checkpoint, which has no native definition: weights, tokenizer, chat template and processor."""

import json
from pathlib import Path

import torch
from tests.models.small_vision import build_vision_tokenizer
from transformers import AyaVisionConfig, AyaVisionForConditionalGeneration

SPECIAL = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL", "TILE")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE, PATCH = 16, 4


def build_aya_model(seed: int = 0) -> AyaVisionForConditionalGeneration:
    """Random weights: a SigLIP tower, a projector of squares of 2 x 2 patches, and Cohere 2 with windows."""
    tokenizer = build_aya_tokenizer()
    text = {
        "model_type": "cohere2",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    torch.manual_seed(seed)
    config = AyaVisionConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layer=-1,
        downsample_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    model = AyaVisionForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "position" not in name:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.eval()


def build_aya_tokenizer():
    tokenizer = build_vision_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_aya_checkpoint(folder: Path) -> Path:
    """The whole checkpoint."""
    build_aya_model().save_pretrained(folder)
    build_aya_tokenizer().save_pretrained(folder)
    named = {"processor_class": "AyaVisionProcessor"}
    settings = {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2}
    (folder / "processor_config.json").write_text(json.dumps(named | settings))
    image = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    image |= {"crop_to_patches": True, "max_patches": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(named | image))
    return folder
