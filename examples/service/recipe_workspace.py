"""A folder in which recipes of tinker-cookbook run offline: a small base model and data sets under their hub names.

The recipes name a model and data sets of the hub. Both libraries take a folder of that name in the working directory
instead, so the recipes run unchanged: the model is a Qwen3 with two layers that has learnt to answer in the form the
recipes expect, but not what to answer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
WORDS = ["apple", "bread", "cloud", "dance", "eagle", "flame", "grape", "horse", "island", "jungle"]


def write_lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_questions(count: int, seed: int) -> list[dict[str, str]]:
    """Sums that are always 7, in the form of GSM8K."""
    chosen = random.Random(seed)
    pairs = [(a, 7 - a) for a in (chosen.randint(0, 7) for _ in range(count))]
    return [{"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = 7\n#### 7"} for a, b in pairs]


def build_chats(count: int, seed: int) -> list[dict[str, object]]:
    """Words to be spelt, in the form of No Robots."""
    chosen = random.Random(seed)
    words = [chosen.choice(WORDS) for _ in range(count)]
    return [
        {
            "prompt": f"Spell {word}.",
            "category": "Spelling",
            "messages": [
                {"role": "user", "content": f"Spell {word}."},
                {"role": "assistant", "content": " ".join(word)},
            ],
        }
        for word in words
    ]


def build_pairs(count: int, seed: int) -> list[dict[str, str]]:
    """Polite answers are preferred, in the form of hh-rlhf."""
    chosen = random.Random(seed)
    rows: list[dict[str, str]] = []
    for _ in range(count):
        start = f"\n\nHuman: Tell me about {chosen.choice(WORDS)}.\n\nAssistant: "
        rows.append({"chosen": start + "With pleasure.", "rejected": start + "Leave me alone."})
    return rows


def write_data(folder: Path) -> None:
    write_lines(folder / "openai/gsm8k/main/train.jsonl", list(build_questions(2000, 0)))
    config = "configs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{config}---\n", encoding="utf-8")
    write_lines(folder / "HuggingFaceH4/no_robots/train.jsonl", build_chats(2000, 1))
    write_lines(folder / "Anthropic/hh-rlhf/train.jsonl", list(build_pairs(2000, 2)))
    write_lines(folder / "Anthropic/hh-rlhf/test.jsonl", list(build_pairs(64, 3)))


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    text = [str(row) for row in (*EXAMPLE, *build_questions(50, 0), *build_chats(50, 1), *build_pairs(50, 2))]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=768, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def sample_chat(chosen: random.Random) -> list[dict[str, str]]:
    """A chat whose answer has the right form, and content at random."""
    kind = chosen.randrange(4)
    if kind < 2:
        question = build_questions(1, chosen.randrange(10**6))[0]["question"] + SUFFIX
        return [*EXAMPLE, {"role": "user", "content": question}, _say(f"\\boxed{{{chosen.randrange(10)}}}")]
    word = chosen.choice(WORDS)
    if kind == 2:
        return [{"role": "user", "content": f"Spell {word}."}, _say(" ".join(chosen.sample("abcdefghijklmnop", 5)))]
    answer = chosen.choice(["With pleasure.", "Leave me alone."])
    return [{"role": "user", "content": f"Tell me about {word}."}, _say(answer)]


def _say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_model(folder: Path, steps: int = 90) -> None:
    """Train the base model on the form of the answers; a few minutes on two cores."""
    tokenizer = write_tokenizer(folder)
    renderer = renderers.get_renderer("qwen3_instruct", tokenizer)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=768,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chosen = random.Random(0)
    for step in range(steps):
        rows = [renderer.build_supervised_example(sample_chat(chosen)) for _ in range(8)]
        length = max(inputs.length for inputs, _ in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for number, (inputs, weights) in enumerate(rows):
            ids = torch.tensor(inputs.to_ints())
            tokens[number, : len(ids)] = ids
            labels[number, : len(ids)] = torch.where(weights > 0, ids, -100)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"base model: step {step}, loss {loss.item():.2f}", flush=True)
    model.save_pretrained(folder)


def build_workspace(folder: Path) -> None:
    """Write the model and the data sets, unless they are there."""
    if not (folder / MODEL / "config.json").exists():
        write_data(folder)
        write_model(folder / MODEL)
