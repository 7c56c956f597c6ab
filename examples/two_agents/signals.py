"""A signalling task for two small models: things to name, a tokenizer, and both models.

Both are random at first, so the speaker's signals mean nothing and the listener guesses. Neither can earn anything by
itself: a signal is worth what the listener makes of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import word_tokenizer

THINGS = "abc"
"""What there is to tell."""
LETTERS = "abcdef"
"""What it is told with: with a few signals to spare, two things seldom end up with the same one."""
ASK, END = ">", "<eos>"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}" + END + "{% else %}"
    "{{ m['content'] }}" + ASK + "{% endif %}{% endfor %}"
)


def write_start(folder: Path, *, rows: int = 60) -> None:
    """``speaker`` and ``listener``, random models with the same tokenizer, and ``things.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(("speaker", "listener")):
        write_model(folder / name, seed)
    things = [THINGS[at % len(THINGS)] for at in range(rows)]
    for name, some in (("things", things), ("each", list(THINGS))):
        lines = [json.dumps({"input": thing, "label": thing}) + "\n" for thing in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def spec() -> DecoderSpec:
    """A Qwen3 of 0.1 M weights."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec(theta=10000.0), qk_norm="head")
    return DecoderSpec(
        family="qwen3",
        vocab_size=len(LETTERS) + 2,
        hidden_size=64,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=MlpSpec(size=128)),),
        tie_embeddings=True,
        max_positions=32,
        eos_token_ids=(len(LETTERS) + 1,),
    )


def write_model(folder: Path, seed: int) -> None:
    """A random model and its tokenizer, as any user brings them."""
    import torch

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    folder.mkdir(parents=True, exist_ok=True)
    decoder = hf.init_random(spec(), seed=seed, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config_from_spec(spec()))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A token for each letter, one that asks for a reply, one that ends it."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, ASK, END])}
    word_tokenizer.write_tokenizer(
        folder, vocabulary, pieces=[END], special=[END], unknown=ASK, eos_token=END, chat_template=TEMPLATE
    )
