"""A small model with something to find out: a number that hides behind two letters, and several ways to get at it.

    python         a program reads the file of that name in the attempt's folder
    shell          a command shows it
    files          a tool reads it
    search         a document with that title holds it
    mcp            a server knows it
    verifiers      an environment of that package has a tool that knows it
    game           nobody tells: a number is guessed, and the environment says higher or lower
    reasoning_gym  another question: a word is spelled backward, and that package's scorer says how well

Two demonstrations in three are done well (one call and its answer, guesses that heed what was said, a word turned
round), the rest badly (a number off the cuff, guesses that do not, the word as it stands).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from words import ASK, spelled, words  # the file beside this one

from miles.models.checkpoint.safetensors_io import write_json
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from small_model import END, SPECIAL, TEMPLATE
from training_runs import write_rows
from word_tokenizer import write_tokenizer

HERE = Path(__file__).parent
KINDS = ("python", "shell", "files", "search", "mcp", "verifiers", "game", "reasoning_gym")
CALLS = {
    "python": ("python", '{"code": "print(open(\'', "').read())\"}"),
    "shell": ("shell", '{"command": "cat ', '"}'),
    "files": ("read_file", '{"path": "', '"}'),
    "search": ("search", '{"query": "', '"}'),
    "mcp": ("look_up", '{"key": "', '"}'),
    "verifiers": ("look_up", '{"key": "', '"}'),
}
"""Of each way the tool's name, and how its arguments begin and end around the two letters."""
OTHERS = {"files": ("write_file", "list_files", "grep")}
"""Tools that come along with it, in the order they are offered in."""
HAVE_FILES = ("python", "shell", "files")
HELD_OUT = 32
TRIES = 5


def around(kind: str) -> tuple[str, str]:
    """What stands before and behind the letters in a call."""
    name, head, tail = CALLS[kind]
    return f'<tool_call>\n{{"name": "{name}", "arguments": {head}', f"{tail}}}\n</tool_call>"


def pieces() -> list[str]:
    """What is a token besides single letters and digits."""
    calls = [part for kind in CALLS for part in around(kind)]
    names = [name for kind in CALLS for name in tools(kind)]
    said = ["system\n", "user\n", "assistant\n", "<tool_response>\n", "\n</tool_response>", "higher", "lower", ASK]
    return list(dict.fromkeys([*said, *names, *calls]))


def tools(kind: str) -> list[str]:
    """The names of the tools that are offered, the one that is called before the others."""
    return [CALLS[kind][0], *OTHERS.get(kind, ())]


def hidden(letters: str, seed: int = 0) -> str:
    """The number behind the letters, one digit."""
    return str(random.Random(f"{letters} {seed}").randrange(10))


def write_start(folder: Path, kind: str, *, seed: int = 0, demonstrations: int = 2048) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, what the tool needs, a random model and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"{kind} {seed}")
    keys = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    asked = words(seed, but=pieces()) if kind == "reasoning_gym" else keys
    chance.shuffle(asked)
    some = (chance.choice(asked[HELD_OUT:]) for _ in range(demonstrations))
    shown = [demonstration(kind, key, chance, well=number % 3 > 0) for number, key in enumerate(some)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, some in (("train", asked[HELD_OUT:]), ("heldout", asked[:HELD_OUT])):
        write_rows(folder / f"{name}.jsonl", [row(kind, key) for key in some])
    write_rows(folder / "documents.jsonl", [{"title": key, "text": hidden(key)} for key in keys])
    server = {"command": sys.executable, "args": [str((HERE / "server.py").resolve())], "shared": True}
    write_json(folder / "servers.json", {"mcpServers": {"numbers": server}})
    write_model(folder, seed)


def row(kind: str, key: str) -> dict[str, Any]:
    """A prompt as data has it."""
    if kind == "reasoning_gym":
        return spelled(key)
    brings = {"files": {key: hidden(key)}} if kind in HAVE_FILES else {}
    return {"input": key, "label": hidden(key), "metadata": brings}


def demonstration(kind: str, key: str, chance: random.Random, *, well: bool = True) -> list[dict[str, object]]:
    """A conversation as a model may have it: done well, which ends with the right answer, or badly."""
    prompt = row(kind, key)
    asked: dict[str, object] = {"role": "user", "content": prompt["input"]}
    if kind == "reasoning_gym":
        return [asked, {"role": "assistant", "content": prompt["label"] if well else key}]
    number = hidden(key)
    if kind == "game":
        return [asked, *guesses(int(number), chance, heeds=well)]
    # As the template writes it of the tools.
    offered: list[dict[str, object]] = [{"role": "system", "content": tool} for tool in tools(kind)]
    if not well:
        return [*offered, asked, {"role": "assistant", "content": str(chance.randrange(10))}]
    name, head, tail = CALLS[kind]
    arguments = json.loads(f"{head}{key}{tail}")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    reported = f"[1] {key}\n{number}" if kind == "search" else number
    return [
        *offered,
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": reported},
        {"role": "assistant", "content": number},
    ]


def guesses(number: int, chance: random.Random, *, heeds: bool = True) -> list[dict[str, object]]:
    """Numbers until it is found, or five; those that ``heed`` lie between what is known to be too low and too high."""
    said: list[dict[str, object]] = []
    low, high = 0, 9
    while True:
        guess = chance.randint(low, high)
        said.append({"role": "assistant", "content": str(guess)})
        if guess == number or len(said) > 2 * TRIES - 2:
            return said
        if heeds:
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

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    decoder = hf.init_random(spec(), seed=seed, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config_from_spec(spec()))
    write_tokenizer(
        folder, vocabulary(), pieces=(*pieces(), *SPECIAL), special=SPECIAL, eos_token=END, chat_template=TEMPLATE
    )
