"""Teach a small vision-language model to count discs: a warm-up on demonstrations, then GRPO on its own answers.

python examples/vision_counting/run.py [FOLDER] [SEED]
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from discs import write_start
from training_runs import run_stages

WARMUP_STEPS = 100
STEPS = 60
EVALUATED = ("heldout", "swapped")


def common_flags(start: Path) -> list[str]:
    """What both runs share: where images are, and how answers are scored on held-out images and on swapped ones."""
    return [
        *("--multimodal-keys", '{"image": "images"}', "--apply-chat-template", "--rm-type", "exact"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "swapped", str(start / "swapped.jsonl")),
        *("--eval-input-key", "input", "--eval-label-key", "label", "--n-samples-per-eval-prompt", "2"),
        *("--rollout-max-response-len", "4", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
    ]


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS, seed: int = 0) -> list[str]:
    """Supervised fine-tuning on conversations, of which the assistant's answers are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss", "--seed", str(seed)),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages"),
        *("--rollout-batch-size", "32", "--num-rollout", str(steps), "--eval-interval", str(steps)),
        *("--lr", "1e-3", "--lr-warmup-iters", "10", "--calculate-per-token-loss"),
        *("--skip-eval-before-train", "--disable-save-rollouts"),
        *common_flags(start),
    ]


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS, seed: int = 0) -> list[str]:
    """Reinforcement learning, where a right number is worth 1."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(save), "--advantage-estimator", "grpo", "--seed", str(seed)),
        *("--prompt-data", str(start / "train.jsonl"), "--input-key", "input", "--label-key", "label"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--lr", "5e-4", "--lr-warmup-iters", "2", "--eval-interval", str(steps)),
        *common_flags(start),
    ]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vision_counting")
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    write_start(root / "start", seed=seed)
    run_stages(root, partial(warmup_flags, seed=seed), partial(grpo_flags, seed=seed), EVALUATED)


if __name__ == "__main__":
    main()
