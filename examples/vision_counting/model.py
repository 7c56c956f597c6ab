"""A Qwen3-VL of 0.6 M weights: random weights, a tokenizer of whole words, a chat template and an image processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from word_tokenizer import write_tokenizer

SIDE = 48
"""Images are resized to SIDE x SIDE pixels: 6 x 6 patches, which become 9 tokens."""
PATCH = 8
INITIALIZER_RANGE = 0.1
END = "<|im_end|>"
PAD = "<|endoftext|>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL = ("<|im_start|>", END, PAD, *VISION)
ROLES = ("system\n", "user\n", "assistant\n")
CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x": '
TOOL_PIECES = (CALL, ', "y": ', ', "factor": ', "}}\n</tool_call>", "<tool_response>\n", "\n</tool_response>", "Image ")
LETTERS = "0123456789.:\n?"
"""Each a token; what no token stands for is read as a question mark."""

TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>system\n{{ t.function.name }}" + END + "\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    # Templates lose a newline right behind a block, so this one is an expression.
    "{% if m.role == 'tool' %}{{ '\\n' }}</tool_response>{% endif %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(
    folder: Path, words: tuple[str, ...], *, seed: int = 0, position_std: float = INITIALIZER_RANGE
) -> None:
    """A checkpoint folder as published ones are; each of ``words`` is a token.

    ``position_std`` is the standard deviation of the tower's position embeddings; with a larger one a model learns
    sooner where something is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder, words)
    _write_processor(folder)
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(_build_config(vocabulary))
    model.model.visual.pos_embed.weight.data.mul_(position_std / INITIALIZER_RANGE)
    model.save_pretrained(folder)


def _build_config(vocabulary: dict[str, int]) -> Qwen3VLConfig:
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
        "bos_token_id": None,
        "eos_token_id": vocabulary[END],
        "pad_token_id": vocabulary[PAD],
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 96,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": INITIALIZER_RANGE,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary["<|video_pad|>"],
        vision_start_token_id=vocabulary["<|vision_start|>"],
        vision_end_token_id=vocabulary["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def _write_tokenizer(folder: Path, words: tuple[str, ...]) -> dict[str, int]:
    """A token for each letter, word and piece of what the template writes; returns the vocabulary."""
    pieces = (*ROLES, *TOOL_PIECES, *words)
    vocabulary = {token: number for number, token in enumerate([*LETTERS, *pieces, *SPECIAL])}
    write_tokenizer(
        folder,
        vocabulary,
        pieces=(*pieces, *SPECIAL),
        special=SPECIAL,
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
    )
    return vocabulary


def _write_processor(folder: Path) -> None:
    settings = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
