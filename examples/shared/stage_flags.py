"""The flags of ``miles train`` that small examples share: a warm-up on demonstrations, then GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def common_flags() -> list[str]:
    """What both stages share."""
    return [
        *("--apply-chat-template", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
        *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
    ]


def warmup(start: Path, save: Path, steps: int, *, lr: float = 3e-3) -> list[str]:
    """Supervised fine-tuning on the conversations of ``warmup.jsonl``, of which the assistant's turns are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss"),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages"),
        *("--rollout-batch-size", "64", "--num-rollout", str(steps), "--disable-save-rollouts"),
        *("--lr", str(lr), "--lr-warmup-iters", "10", "--calculate-per-token-loss", *common_flags()),
    ]


def grpo(
    start: Path,
    save: Path,
    steps: int,
    *,
    prompts: int = 8,
    samples: int = 8,
    lr: float = 1e-3,
    max_response_len: int = 24,
    parts: Sequence[str] = ("train",),
) -> list[str]:
    """GRPO on ``train.jsonl`` (or the files of ``parts``), evaluated on ``heldout.jsonl`` five times.

    The checkpoint, or the policies, and what the policy may use are flags of the example.
    """
    return [
        *("--save", str(save), "--advantage-estimator", "grpo"),
        *("--prompt-data", *(str(start / f"{part}.jsonl") for part in parts)),
        *("--input-key", "input", "--label-key", "label", "--eval-label-key", "label"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "--n-samples-per-eval-prompt", "4"),
        *("--eval-interval", str(-(-steps // 4)), "--rollout-max-response-len", str(max_response_len)),
        *("--rollout-batch-size", str(prompts), "--n-samples-per-prompt", str(samples), "--num-rollout", str(steps)),
        *("--lr", str(lr), "--lr-warmup-iters", "2", *common_flags()),
    ]


def in_turns(turns: int, *means: str) -> list[str]:
    """Replies in several turns; ``means`` are flags with tools or an environment."""
    return ["--custom-generate-function-path", "multi_turn", "--generate-max-turns", str(turns), *means]
