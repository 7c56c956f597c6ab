"""A multiplication task for a small model: questions, demonstrations with and without a calculator, and the model.

Half the demonstrations call the calculator, half give the answer off the cuff. A model this small copies well and
multiplies badly, so what it learns from the second half is to be wrong: which habit pays is for GRPO to find out.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from miles.models.tokenizer import HfTokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import word_tokenizer
from small_model import END, SPECIAL, TEMPLATE
from training_runs import write_rows

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "'
DONE = '"}}\n</tool_call>'
PIECES = ("system\n", "calculator", "user\n", "assistant\n", CALL, DONE, "<tool_response>\n", "\n</tool_response>")
LETTERS = "0123456789+-*\n?"
"""Each a token, and so is each of the pieces above; anything else reads as a question mark."""


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096, questions: int = 2048) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"products {seed}")
    # Results of one length: a model this small copies by place.
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    chance.shuffle(pairs)
    heldout, rest = pairs[:64], pairs[64:]
    shown = [demonstration(*chance.choice(rest), calls=number % 2 == 0) for number in range(demonstrations)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, asked in (("train", rest[:questions]), ("heldout", heldout)):
        write_rows(folder / f"{name}.jsonl", [{"input": f"{a}*{b}", "label": str(a * b)} for a, b in asked])
    _write_model(folder, seed)


def demonstration(a: int, b: int, *, calls: bool) -> list[dict[str, object]]:
    """A conversation that ends with the right answer, found with the calculator or not."""
    offered = {"role": "system", "content": "calculator"}  # as the template writes it of the tool itself
    question = {"role": "user", "content": f"{a}*{b}"}
    answer = {"role": "assistant", "content": str(a * b)}
    if not calls:
        return [offered, question, answer]
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [offered, question, asks, {"role": "tool", "content": str(a * b)}, answer]


def tokenizer() -> HfTokenizer:
    """The tokenizer, made anew."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))


def write_tokenizer(folder: Path) -> None:
    """A token for each letter and each piece of what the template writes."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, *PIECES, *SPECIAL])}
    pieces = (*PIECES, *SPECIAL)
    word_tokenizer.write_tokenizer(
        folder, vocabulary, pieces=pieces, special=SPECIAL, eos_token=END, chat_template=TEMPLATE
    )


def spec() -> DecoderSpec:
    """A Qwen3 of 0.2 M weights."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=24, rope=RopeSpec(theta=10000.0), qk_norm="head")
    size = len(LETTERS) + len(PIECES) + len(SPECIAL)
    return DecoderSpec(
        family="qwen3",
        vocab_size=size,
        hidden_size=96,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=MlpSpec(size=256)),),
        tie_embeddings=True,
        max_positions=96,
        eos_token_ids=(size - 1,),
    )


def _write_model(folder: Path, seed: int) -> None:
    import torch

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    decoder = hf.init_random(spec(), seed=seed, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config_from_spec(spec()))
    write_tokenizer(folder)
