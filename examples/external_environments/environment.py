"""Two environments of other people's packages, and a small model that has seen them played: badly, but by the rules.

    textarena   TextArena's own GuessTheNumber: a number from 1 to 20 in four guesses, each answered higher or lower
    openenv     a board of three by three with a chest on it, served by OpenEnv's own server (``server.py``)

Demonstrations are played in the very environments the policy will play in, by somebody who often does not think.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.core.types import Prompt
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from miles.rollout.tools.environment import Environment
from miles.rollout.tools.environments.openenv import OpenEnvEnvironment
from miles.rollout.tools.environments.text_games import TextArenaGame

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from training_runs import write_rows
from word_tokenizer import write_tokenizer

HERE = Path(__file__).parent
KINDS = ("textarena", "openenv")
DEMONSTRATIONS = {"textarena": 2048, "openenv": 2048}
ASKED = {"textarena": "Play.", "openenv": "Walk."}
MOVES = ("north", "south", "east", "west")
MOST = 20
GUESSING = {"game": "GuessTheNumber-v0-train", "settings": {"min_number": 1, "max_number": MOST, "max_turns": 3}}
HINTS = ("The target number is higher.", "The target number is lower.")
END = "<|im_end|>"
SPECIAL = ("<|im_start|>", END)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Talk = list[dict[str, Any]]
Player = Callable[[Talk, random.Random], str]


@contextmanager
def served(*games: str) -> Iterator[str]:
    """The address of ``server.py``, which runs as long as this is open."""
    command = [sys.executable, str(HERE / "server.py"), *games]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def settings_of(kind: str, url: str) -> dict[str, Any]:
    """What ``--generate-environment`` is given; ``url`` is OpenEnv's server."""
    if kind == "textarena":
        return {"name": kind, **GUESSING}
    return {"name": kind, "url": url, "action": "move", "observation": "text"}


def build_environment(kind: str, url: str) -> Environment:
    """The same environment, for one game."""
    settings = {key: value for key, value in settings_of(kind, url).items() if key != "name"}
    return TextArenaGame(**settings) if kind == "textarena" else OpenEnvEnvironment(**settings)


async def played(environment: Environment, prompt: Prompt, player: Player, chance: random.Random) -> Talk:
    """A game from its first word to its last."""
    try:
        said: Talk = [dict(message) for message in (await environment.open(prompt)).messages]
        while True:
            said.append({"role": "assistant", "content": player(said, chance)})
            step = await environment.step(said[-1])
            if step.done:
                return said
            said += [dict(message) for message in step.messages]
    finally:
        await environment.close()


def guess(said: Talk, chance: random.Random) -> str:
    """A number not tried yet, half of the time one that the hints leave."""
    tried = [int(m["content"]) for m in said if m["role"] == "assistant"]
    hints = [m["content"] for m in said if m["content"] in HINTS]
    left = [n for n in range(1, MOST + 1) if n not in tried]
    if chance.random() < 0.5:
        return str(chance.choice(left))
    higher = [(n, hint == HINTS[0]) for n, hint in zip(tried, hints, strict=True)]
    return str(chance.choice([n for n in left if all((n > t) == up for t, up in higher)]))


def walk(said: Talk, chance: random.Random) -> str:
    """A move, three times of four one that leads nearer to the chest."""
    here, chest = said[-1]["content"][:2], said[-1]["content"][-2:]
    across, up = ord(chest[0]) - ord(here[0]), int(chest[1]) - int(here[1])
    nearer = [move for move, leads in zip(MOVES, (up > 0, up < 0, across > 0, across < 0), strict=True) if leads]
    return chance.choice(nearer if chance.random() < 0.75 else MOVES)


def demonstrations(kind: str, url: str, count: int, chance: random.Random) -> list[Talk]:
    """As many games, each with a seed of its own."""
    player = guess if kind == "textarena" else walk

    async def all_of_them() -> list[Talk]:
        return [
            await played(build_environment(kind, url), prompt_of(kind, chance.randrange(1 << 30)), player, chance)
            for _ in range(count)
        ]

    return asyncio.run(all_of_them())


def prompt_of(kind: str, seed: int) -> Prompt:
    return Prompt(id=0, messages=({"role": "user", "content": ASKED[kind]},), metadata={"seed": seed})


def write_start(folder: Path, kind: str, url: str, shown: int, *, seed: int = 0) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"{kind} {seed}")
    talks = demonstrations(kind, url, shown, chance)
    write_rows(folder / "warmup.jsonl", [{"messages": talk} for talk in talks])
    seeds = chance.sample(range(1 << 30), 1024 + 128)
    for name, some in (("train", seeds[128:]), ("heldout", seeds[:128])):
        write_rows(folder / f"{name}.jsonl", [{"input": ASKED[kind], "metadata": {"seed": each}} for each in some])
    write_model(folder, vocabulary(kind, talks[0]), seed)


def vocabulary(kind: str, talk: Talk) -> dict[str, int]:
    """Tokens are words, numbers and squares' letters, and of the game's rules, as ``talk`` has them, whole lines."""
    words = (*ASKED.values(), *HINTS, *MOVES, *SPECIAL[:-1], "user\n", "assistant\n", " to ")
    rules = talk[1]["content"].split("\n") if kind == "textarena" else ()
    known = [*"abc0123456789 \n.?", *(str(n) for n in range(10, MOST + 1)), *words, *rules, SPECIAL[-1]]
    return {token: i for i, token in enumerate(dict.fromkeys(known))}


def spec(size: int) -> DecoderSpec:
    """A Qwen3 of 0.2 M weights."""
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=24, rope=RopeSpec(theta=10000.0), qk_norm="head")
    return DecoderSpec(
        family="qwen3",
        vocab_size=size,
        hidden_size=96,
        norm_eps=1e-6,
        layers=2 * (LayerSpec(mixer=attention, ffn=MlpSpec(size=256)),),
        tie_embeddings=True,
        max_positions=256,
        eos_token_ids=(size - 1,),
    )


def write_model(folder: Path, known: Mapping[str, int], seed: int) -> None:
    import torch

    from miles.models.checkpoint import hf
    from miles.models.families import config_from_spec

    shape = spec(len(known))
    decoder = hf.init_random(shape, seed=seed, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config_from_spec(shape))
    pieces = [token for token in known if len(token) > 1]
    write_tokenizer(folder, known, pieces=pieces, special=SPECIAL, eos_token=END, chat_template=TEMPLATE)
