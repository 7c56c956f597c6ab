"""Train the small model in one of the environments of environment.py: a warm-up on demonstrations, then GRPO.

python examples/tool_environments/run.py python|shell|files|search|mcp|verifiers|game|reasoning_gym [FOLDER]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from environment import HERE, KINDS, write_start
from training_runs import measured, newest

WARMUP_STEPS = 200
STEPS = 40


def means(kind: str, start: Path) -> list[str]:
    """What the policy may use."""
    return {
        "python": ["--generate-tools", "python"],
        "shell": ["--generate-tools", "shell"],
        "files": ["--generate-tools", "files"],
        "search": ["--generate-tools", "search", "--search-documents", str(start / "documents.jsonl")],
        "mcp": ["--generate-tools", "mcp:numbers", "--mcp-servers", str(start / "servers.json")],
        "verifiers": ["--generate-environment", '{"name": "verifiers", "id": "letters-env"}'],
        "game": ["--generate-environment", f"{HERE / 'game.py'}:Guess"],
        "reasoning_gym": ["--generate-environment", "reasoning_gym"],
    }[kind]


def common_flags() -> list[str]:
    """What both runs share."""
    return [
        *("--apply-chat-template", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
    ]


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    """Supervised fine-tuning on conversations, of which the assistant's turns are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss"),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages"),
        *("--rollout-batch-size", "64", "--num-rollout", str(steps)),
        *("--lr", "3e-3", "--lr-warmup-iters", "20", "--calculate-per-token-loss"),
        *("--disable-save-rollouts", *common_flags()),
    ]


def grpo_flags(kind: str, start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Reinforcement learning from what the environment makes of its replies."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(save), "--advantage-estimator", "grpo"),
        *("--prompt-data", str(start / "train.jsonl"), "--input-key", "input", "--label-key", "label"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "--eval-label-key", "label"),
        *("--n-samples-per-eval-prompt", "4"),
        *("--custom-generate-function-path", "multi_turn", "--generate-max-turns", "6", *means(kind, start)),
        *("--rm-type", "exact", "--tool-result-chars", "16", "--rollout-max-response-len", "24"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--lr", "1e-3", "--lr-warmup-iters", "2", "--eval-interval", str(steps), *common_flags()),
    ]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(KINDS)} [FOLDER]")
    kind = sys.argv[1]
    root = Path(sys.argv[2] if len(sys.argv) > 2 else f"runs/tool_environments/{kind}")
    start, warmup, grpo = root / "start", root / "warmup", root / "grpo"
    write_start(start, kind)
    train = [sys.executable, "-m", "miles.launch.main", "train"]
    # The first is where verifiers finds letters_env, which is not installed.
    places = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    subprocess.run([*train, *warmup_flags(start, warmup)], check=True, env=found)
    subprocess.run([*train, *grpo_flags(kind, start, newest(warmup), grpo)], check=True, env=found)
    before, after = (row["eval/heldout/reward"] for row in measured(grpo, "eval"))
    print(f"{kind}: {before:.2f} held out before GRPO, {after:.2f} after")


if __name__ == "__main__":
    main()
