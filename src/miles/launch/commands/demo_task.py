"""The demo's world: words to reverse, a tokenizer of single letters, and a language model of 0.2 M weights.

Everything is made here from a seed and written as what any user brings: JSONL prompts and a Hugging
Face checkpoint with its tokenizer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

from miles.kernels.numerics import FAST
from miles.models.checkpoint.safetensors_io import write_json
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

ASK = ">"
END = "<eos>"
TEMPLATE = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages[ns.last:] %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}" + END + "{% else %}{{ m['content'] }}" + ASK + "{% endif %}"
    "{% endfor %}"
)
"""Every question stands alone: a model that reverses words needs no memory of the last one."""


LONGER = 2.0
"""How much likelier a demonstration is for each letter more: a length that is never right cannot be reinforced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How many words of which lengths; no held-out word is ever trained on."""

    shortest: int = 3
    longest: int = 5
    warmup_words: int = 6400
    train_words: int = 4096
    heldout_words: int = 128


def write_task(folder: Path, task: Task, seed: int) -> None:
    """``heldout.jsonl``, ``warmup.jsonl`` and ``train.jsonl``, rows of ``{"input": "abc", "label": "cba"}``."""
    chance = random.Random(f"words {seed}")

    lengths = range(task.shortest, task.longest + 1)

    def word(favour: float = 1.0) -> str:
        (length,) = chance.choices(lengths, [favour**n for n in lengths])
        return "".join(chance.choices(ascii_lowercase, k=length))

    heldout: dict[str, None] = {}
    while len(heldout) < task.heldout_words:
        heldout[word()] = None
    for name, count, favour in (("warmup", task.warmup_words, LONGER), ("train", task.train_words, 1.0)):
        words: list[str] = []
        while len(words) < count:
            if (one := word(favour)) not in heldout:
                words.append(one)
        _write_rows(folder / f"{name}.jsonl", words)
    _write_rows(folder / "heldout.jsonl", list(heldout))


def _write_rows(path: Path, words: list[str]) -> None:
    path.write_text("".join(json.dumps({"input": w, "label": w[::-1]}) + "\n" for w in words))


def spec(*, moe: bool) -> DecoderSpec:
    """A Qwen3 (or Qwen3-MoE) small enough to learn on two CPU cores while someone watches."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=24, rope=RopeSpec(theta=10000.0), qk_norm="head")
    experts = MoeSpec(num_experts=8, experts_per_token=2, size=128, norm_topk_prob=True)
    return DecoderSpec(
        family="qwen3_moe" if moe else "qwen3",
        vocab_size=len(ascii_lowercase) + 2,
        hidden_size=96,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=experts if moe else MlpSpec(size=256)),),
        tie_embeddings=True,
        max_positions=64,
        eos_token_ids=(len(ascii_lowercase) + 1,),
    )


def write_checkpoint(folder: Path, *, moe: bool, seed: int) -> None:
    """A randomly initialised model and its tokenizer, in Hugging Face format."""
    import torch

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    made = spec(moe=moe)
    folder.mkdir(parents=True, exist_ok=True)
    decoder = hf.init_random(made, seed=seed, device="cpu", dtype=torch.float32, numerics=FAST)
    hf.export(decoder, folder, like=None, config=config_from_spec(made))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A token for each letter, one for the question mark of the task, one for the end."""
    vocabulary = {token: i for i, token in enumerate([*ascii_lowercase, ASK, END])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": vocabulary[END], "content": END, **special}],
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": ASK},
        },
    )
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE},
    )
