"""Small vision-language checkpoints, whole as published ones are: weights, tokenizer, chat template and processor."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Content is a text or typed parts; tool results are the user's.
TEMPLATE = """
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' -}}
{%- if message.role == 'tool' -%}{{- '<tool_response>\\n' -}}{%- endif -%}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- ('\\n' if message.content else '') + '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- if message.role == 'tool' -%}{{- '\\n</tool_response>' -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_CLASSES: dict[str, tuple[type[Any], type[Any], str]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, "Qwen2VLProcessor"),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, "Qwen2_5_VLProcessor"),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, "Qwen3VLProcessor"),
}
PATCH_SIZE = 4
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}


def build_vision_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and the special tokens of Qwen's vision models."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("Ċ", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": [s for s in SPECIAL if s not in fast.all_special_tokens]})
    fast.chat_template = TEMPLATE
    return fast


def vision_config(kind: str, *, patch_size: int = PATCH_SIZE, **text: Any) -> Any:
    """The config of a small model; ``text`` are arguments of its text part."""
    vocab = build_vision_tokenizer().get_vocab()
    family = _CLASSES[kind][0]
    text_config: dict[str, Any] = {
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            **({"mrope_interleaved": True} if kind == "qwen3_vl" else {}),
        },
        "bos_token_id": None,
        "eos_token_id": vocab["<|im_end|>"],
        "pad_token_id": vocab["<|endoftext|>"],
        **text,
    }
    vision = {"patch_size": patch_size, "spatial_merge_size": 2, "temporal_patch_size": 2, **_VISION[kind]}
    if "window_size" in vision:
        vision["window_size"] = 4 * patch_size
    return family(
        text_config=text_config,
        vision_config=vision,
        image_token_id=vocab["<|image_pad|>"],
        video_token_id=vocab["<|video_pad|>"],
        vision_start_token_id=vocab["<|vision_start|>"],
        vision_end_token_id=vocab["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def build_vision_model(kind: str, seed: int = 0, *, patch_size: int = PATCH_SIZE, **text: Any) -> PreTrainedModel:
    """A small model of random weights, wide enough apart that other images give other logits."""
    config = vision_config(kind, patch_size=patch_size, **text)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = _CLASSES[kind][1](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.25 * torch.randn_like(parameter))
            elif "norm" not in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()


def write_processor(folder: Path, kind: str, *, patch_size: int = PATCH_SIZE) -> Path:
    """The tokenizer, chat template and image processor of a small model, in a published checkpoint's files."""
    folder.mkdir(parents=True, exist_ok=True)
    build_vision_tokenizer().save_pretrained(folder)
    settings = {
        "processor_class": _CLASSES[kind][2],
        "image_processor_type": "Qwen2VLImageProcessorFast" if kind == "qwen3_vl" else "Qwen2VLImageProcessor",
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (4 * patch_size) ** 2, "longest_edge": (16 * patch_size) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_vision_checkpoint(
    folder: Path, kind: str = "qwen2_5_vl", *, seed: int = 0, patch_size: int = PATCH_SIZE, **text: Any
) -> Path:
    """A whole checkpoint folder; two by two patches become one token, and an image at most 64 of them."""
    write_processor(folder, kind, patch_size=patch_size)
    build_vision_model(kind, seed, patch_size=patch_size, **text).save_pretrained(folder)
    return folder


def draw_image(seed: int = 0, width: int = 40, height: int = 32) -> Image.Image:
    """An image of random coloured blocks, another one for each seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def draw_png(seed: int = 0, width: int = 40, height: int = 32) -> bytes:
    """The PNG file of ``draw_image``."""
    out = io.BytesIO()
    draw_image(seed, width, height).save(out, format="PNG")
    return out.getvalue()
