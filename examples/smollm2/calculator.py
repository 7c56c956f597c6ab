"""Products that a small model cannot compute, and a calculator that it may ask: an environment of two turns.

The policy writes ``CALC 12*34`` and is told the result, or ``ANSWER 408``, which ends the conversation. A third of the
demonstrations ask; the others answer at once, and most of these are wrong. GRPO has to find out which is better.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from miles.core.types import Prompt
from miles.rollout.tools.environment import OpenResult, StepResult
from miles.rollout.tools.tool import Message

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from training_runs import write_rows

_CALL = re.compile(r"CALC (\d{1,4})\*(\d{1,4})")
_ANSWER = re.compile(r"ANSWER (-?\d+)")
QUESTION = "What is {a} times {b}? Write CALC {a}*{b} to use the calculator, or ANSWER and the number."


class Calculator:
    """An environment (see docs/tools.md): the right answer is worth 1, with or without the calculator."""

    def __init__(self) -> None:
        self._answer = 0

    async def open(self, prompt: Prompt) -> OpenResult:
        self._answer = prompt.metadata["answer"]
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        said = str(reply["content"]).strip()
        if asked := _CALL.fullmatch(said):
            return StepResult(messages=[{"role": "user", "content": f"RESULT {int(asked[1]) * int(asked[2])}"}])
        answered = _ANSWER.fullmatch(said)
        return StepResult(reward=float(answered is not None and int(answered[1]) == self._answer), done=True)

    async def close(self) -> None:
        return


def demonstrate(a: int, b: int, chance: random.Random) -> list[dict[str, str]]:
    """A conversation: one in three asks the calculator, the others guess."""
    messages = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    if chance.random() < 1 / 3:
        messages.append({"role": "assistant", "content": f"CALC {a}*{b}"})
        messages.append({"role": "user", "content": f"RESULT {a * b}"})
        return [*messages, {"role": "assistant", "content": f"ANSWER {a * b}"}]
    return [*messages, {"role": "assistant", "content": f"ANSWER {a * b + chance.randint(-50, 50)}"}]


def write_data(folder: Path, *, seed: int = 0, rows: int = 4096) -> None:
    """``warmup.jsonl`` with demonstrations, and prompts: ``train.jsonl`` and ``heldout.jsonl``, of other numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"products {seed}")
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    chance.shuffle(pairs)
    shown, heldout, train = pairs[:1024], pairs[1024:1152], pairs[1152 : 1152 + rows]
    write_rows(folder / "warmup.jsonl", [{"messages": demonstrate(a, b, chance)} for a, b in shown])
    for name, part in (("train", train), ("heldout", heldout)):
        asked = [{"input": QUESTION.format(a=a, b=b), "metadata": {"answer": a * b}} for a, b in part]
        write_rows(folder / f"{name}.jsonl", asked)


def data_flags(data: Path) -> list[str]:
    """Prompts, and the environment that grades them."""
    return [
        *("--prompt-data", str(data / "train.jsonl"), "--input-key", "input"),
        *("--eval-prompt-data", "heldout", str(data / "heldout.jsonl")),
        *("--custom-generate-function-path", "multi_turn", "--generate-max-turns", "3"),
        *("--generate-environment", f"{Path(__file__).resolve()}:Calculator"),
    ]


def warmup_flags(model: Path, data: Path, save: Path) -> list[str]:
    """Supervised fine-tuning on the demonstrations, so that the model knows both ways to reply."""
    return [
        *("--hf-checkpoint", str(model), "--save", str(save), "--loss-type", "sft_loss", "--apply-chat-template"),
        *("--prompt-data", str(data / "warmup.jsonl"), "--input-key", "messages", "--calculate-per-token-loss"),
        *("--rollout-batch-size", "64", "--num-rollout", "30", "--lr", "3e-5", "--lr-warmup-iters", "3"),
        *("--dtype", "bfloat16", "--disable-save-rollouts", "--view", "plain"),
    ]
