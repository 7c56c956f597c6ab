"""Tiny checkpoints with a tokenizer and a chat template, the same bytes on every machine, for two servers to load."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 320
CONTEXT = 512
END = 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", " quick", " brown", " fox", " jumps", " over", " lazy", " dog", " and", "user", "assistant", "system")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 3}
"""Sizes of a model whose weights are whole blocks of FP8; ``moe_intermediate_size`` must be a multiple of 128 too."""


def make(folder: Path, seed: int, *, experts: bool = False, **sizes: Any) -> Path:
    """A Qwen3 (or Qwen3-MoE) checkpoint in float32; the seed is in every weight. ``sizes`` replace the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3MoeConfig(**{**SIZES, **EXPERTS, **sizes}) if experts else Qwen3Config(**{**SIZES, **sizes})
    config.dtype = torch.float32
    model = Qwen3MoeForCausalLM(config) if experts else Qwen3ForCausalLM(config)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)  # for the names and the papers; the weights are written over
    file = folder / "model.safetensors"
    save_file(_weights(file, seed), file, metadata={"format": "pt"})
    _tokenizer().save_pretrained(folder)
    return folder


def _weights(file: Path, seed: int) -> dict[str, torch.Tensor]:
    """Numbers of numpy's old generator, whose stream is promised never to change; each tensor has its own."""
    from safetensors.torch import load_file

    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    return {name: torch.from_numpy(_numbers(name, shape, seed)) for name, shape in shapes.items()}


def _numbers(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    drawn = np.random.RandomState(zlib.crc32(name.encode()) ^ seed).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 1 + drawn / 10
    return drawn * np.float32(0.4 if "lm_head" in name else 0.15)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, three special tokens, and a few words; made of rules, not trained."""
    pieces: dict[str, int] = {
        name: i for i, name in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    }
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        letters = word.replace(" ", "Ġ")
        for end in range(1, len(letters)):
            if letters[: end + 1] not in pieces:
                merges.append((letters[:end], letters[end]))
                pieces[letters[: end + 1]] = len(pieces)
    assert len(pieces) <= VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[END], pad_token=SPECIAL[0])
    fast.chat_template = TEMPLATE
    return fast


def papers(folder: Path) -> dict[str, Any]:
    """What ``config.json`` says."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
