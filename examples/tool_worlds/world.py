"""A small model with something to find out: a number that hides behind two letters, and four ways to get at it.

    python   a program reads the file of that name in the attempt's folder
    search   a document with that title holds it
    mcp      a server knows it
    game     nobody tells: a number is guessed, and the world says higher or lower

The first three are shown as demonstrations of one call and its answer, the last as a few guesses.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from string import ascii_lowercase

from miles.models.files import write_json
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

HERE = Path(__file__).parent
KINDS = ("python", "search", "mcp", "game")
CALLS = {
    "python": ("python", '{"code": "print(open(\'', "').read())\"}"),
    "search": ("search", '{"query": "', '"}'),
    "mcp": ("look_up", '{"key": "', '"}'),
}
"""Of each way the tool's name, and how its arguments begin and end around the two letters."""
END = "<|im_end|>"
SPECIAL = ("<|im_start|>", END)
TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>system\n{{ t.function.name }}" + END + "\n{% endfor %}"
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role != 'assistant' %}{{ m.role }}\n{{ m.content }}"
    "{% else %}assistant\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endif %}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def around(kind: str) -> tuple[str, str]:
    """What stands before and behind the letters in a call."""
    name, head, tail = CALLS[kind]
    return f'<tool_call>\n{{"name": "{name}", "arguments": {head}', f"{tail}}}\n</tool_call>"


def pieces() -> list[str]:
    """What is a token besides single letters and digits."""
    calls = [part for kind in CALLS for part in around(kind)]
    names = [name for name, _, _ in CALLS.values()]
    words = ["system\n", "user\n", "assistant\n", "<tool_response>\n", "\n</tool_response>", "higher", "lower"]
    return list(dict.fromkeys([*words, *names, *calls]))


def hidden(letters: str, seed: int = 0) -> str:
    """The number behind the letters, one digit."""
    return str(random.Random(f"{letters} {seed}").randrange(10))


def write_start(folder: Path, kind: str, *, seed: int = 0, demonstrations: int = 2048) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, what the tool needs, a random model and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"{kind} {seed}")
    keys = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    chance.shuffle(keys)
    shown = [{"messages": demonstration(kind, chance.choice(keys[64:]), chance)} for _ in range(demonstrations)]
    _write(folder / "warmup.jsonl", shown)
    for name, some in (("train", keys[64:]), ("heldout", keys[:64])):
        _write(folder / f"{name}.jsonl", [_row(kind, key) for key in some])
    _write(folder / "documents.jsonl", [{"title": key, "text": hidden(key)} for key in keys])
    server = {"command": sys.executable, "args": [str((HERE / "server.py").resolve())], "shared": True}
    write_json(folder / "servers.json", {"mcpServers": {"numbers": server}})
    write_model(folder, seed)


def _row(kind: str, key: str) -> dict[str, object]:
    brings = {"files": {key: hidden(key)}} if kind == "python" else {}
    return {"input": key, "label": hidden(key), "metadata": brings}


def demonstration(kind: str, key: str, chance: random.Random) -> list[dict[str, object]]:
    """A conversation that ends with the right number."""
    number = hidden(key)
    asked: dict[str, object] = {"role": "user", "content": key}
    if kind == "game":
        return [asked, *guesses(int(number), chance)]
    name, head, tail = CALLS[kind]
    arguments = json.loads(f"{head}{key}{tail}")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    told = f"[1] {key}\n{number}" if kind == "search" else number
    return [
        {"role": "system", "content": name},  # as the template writes it of the tool itself
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": told},
        {"role": "assistant", "content": number},
    ]


def guesses(number: int, chance: random.Random) -> list[dict[str, object]]:
    """Numbers between what is known to be too low and too high, until it is found."""
    said: list[dict[str, object]] = []
    low, high = 0, 9
    while True:
        guess = chance.randint(low, high)
        said.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            return said
        low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        said.append({"role": "user", "content": "higher" if guess < number else "lower"})


def spec() -> DecoderSpec:
    """A Qwen3 of 0.2 M weights."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=24, rope=RopeSpec(theta=10000.0), qk_norm="head")
    size = len(vocabulary())
    return DecoderSpec(
        family="qwen3",
        vocab_size=size,
        hidden_size=96,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=MlpSpec(size=256)),),
        tie_embeddings=True,
        max_positions=128,
        eos_token_ids=(size - 1,),
    )


def vocabulary() -> dict[str, int]:
    letters = "0123456789" + ascii_lowercase + "[] \n?"
    return {token: i for i, token in enumerate([*letters, *pieces(), *SPECIAL])}


def write_model(folder: Path, seed: int) -> None:
    import torch

    from miles.models import hub
    from miles.models.families import config_of

    decoder = hub.random(spec(), seed=seed, device="cpu", dtype=torch.float32)
    hub.export(decoder, folder, like=None, config=config_of(spec()))
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    known = vocabulary()
    added = [
        {"id": known[token], "content": token, **whole, "special": token in SPECIAL} for token in (*pieces(), *SPECIAL)
    ]
    split = {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False}
    empty = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    model = {"type": "WordLevel", "vocab": known, "unk_token": "?"}
    rest = {"added_tokens": added, "pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}
    write_json(folder / "tokenizer.json", empty | rest)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", names)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
