"""Teach the small model to reach for its calculator: a warm-up on demonstrations, then GRPO on its own attempts.

python examples/calculator_tool/run.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from products import write_start
from training_runs import measured, newest

WARMUP_STEPS = 150
STEPS = 40


def common_flags(start: Path) -> list[str]:
    """What both runs share: how a question is answered, and how the answer is scored."""
    return [
        *("--eval-label-key", "label", "--apply-chat-template", "--rm-type", "exact"),
        *("--custom-generate-function-path", f"{Path(__file__).parent / 'generate.py'}:Calculating"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "--n-samples-per-eval-prompt", "4"),
        *("--rollout-max-response-len", "24", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
    ]


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    """Supervised fine-tuning on conversations, of which the assistant's turns are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss"),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages", "--eval-input-key", "input"),
        *("--rollout-batch-size", "64", "--num-rollout", str(steps), "--eval-interval", str(steps)),
        *("--lr", "3e-3", "--lr-warmup-iters", "20", "--calculate-per-token-loss"),
        *("--skip-eval-before-train", "--disable-save-rollouts"),
        *common_flags(start),
    ]


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Reinforcement learning, where a right answer is worth 1 however it was found."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(save), "--advantage-estimator", "grpo"),
        *("--prompt-data", str(start / "train.jsonl"), "--input-key", "input", "--label-key", "label"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--lr", "1e-3", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.05", "--eval-interval", str(steps)),
        *common_flags(start),
    ]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator_tool")
    start, warmup, grpo = root / "start", root / "warmup", root / "grpo"
    write_start(start)
    train = [sys.executable, "-m", "miles.launch.main", "train"]
    subprocess.run([*train, *warmup_flags(start, warmup)], check=True)
    subprocess.run([*train, *grpo_flags(start, newest(warmup), grpo)], check=True)
    before, after = (row["eval/heldout/reward"] for row in measured(grpo, "eval"))
    print(f"held-out products: {before:.2f} right before GRPO, {after:.2f} after")


if __name__ == "__main__":
    main()
