"""Teach the small model to find a number out with a tool, or to guess it: a warm-up on demonstrations, then GRPO.

python examples/tool_worlds/run.py python|search|mcp|game [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from world import HERE, KINDS, write_start  # the file beside this one

WARMUP_STEPS = 150
STEPS = 40


def means(kind: str, start: Path) -> list[str]:
    """What the policy may use."""
    return {
        "python": ["--generate-tools", "python"],
        "search": ["--generate-tools", "search", "--search-documents", str(start / "documents.jsonl")],
        "mcp": ["--generate-tools", "mcp:numbers", "--mcp-servers", str(start / "servers.json")],
        "game": ["--generate-environment", f"{HERE / 'game.py'}:Guess"],
    }[kind]


def common_flags(kind: str, start: Path) -> list[str]:
    """What both runs share: how a question is answered, and how the answer is scored."""
    return [
        *("--custom-generate-function-path", "multi_turn", "--generate-max-turns", "6", *means(kind, start)),
        *("--apply-chat-template", "--rm-type", "exact", "--eval-label-key", "label"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "--tool-result-chars", "16"),
        *("--rollout-max-response-len", "24", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
    ]


def warmup_flags(kind: str, start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    """Supervised fine-tuning on conversations, of which the assistant's turns are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss"),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages", "--eval-input-key", "input"),
        *("--rollout-batch-size", "64", "--num-rollout", str(steps), "--eval-interval", str(steps)),
        *("--lr", "3e-3", "--lr-warmup-iters", "20", "--calculate-per-token-loss"),
        *("--skip-eval-before-train", "--disable-save-rollouts", *common_flags(kind, start)),
    ]


def grpo_flags(kind: str, start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Reinforcement learning from what the world makes of its replies."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(save), "--advantage-estimator", "grpo"),
        *("--prompt-data", str(start / "train.jsonl"), "--input-key", "input", "--label-key", "label"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--lr", "1e-3", "--lr-warmup-iters", "2", "--eval-interval", str(steps), *common_flags(kind, start)),
    ]


def newest(run: Path) -> Path:
    """The last checkpoint of a run."""
    return max((run / "checkpoints").glob("step-*"))


def measured(run: Path, kind: str) -> list[dict[str, float]]:
    """The run's metrics of one kind, in order."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == kind]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(KINDS)} [FOLDER]")
    kind = sys.argv[1]
    root = Path(sys.argv[2] if len(sys.argv) > 2 else f"runs/tool_worlds/{kind}")
    start, warmup, grpo = root / "start", root / "warmup", root / "grpo"
    write_start(start, kind)
    train = [sys.executable, "-m", "miles.launch.main", "train"]
    subprocess.run([*train, *warmup_flags(kind, start, warmup)], check=True)
    subprocess.run([*train, *grpo_flags(kind, start, newest(warmup), grpo)], check=True)
    before, after = (row["eval/heldout/reward"] for row in measured(grpo, "eval"))
    print(f"{kind}: {before:.2f} held out before GRPO, {after:.2f} after")


if __name__ == "__main__":
    main()
