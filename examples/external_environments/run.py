"""Teach the small model to play in other people's environments: a warm-up on games played badly, then GRPO.

python examples/external_environments/run.py textarena|openenv [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from environment import DEMONSTRATIONS, KINDS, served, settings_of, write_start
from training_runs import measured, newest

WARMUP_STEPS = {"textarena": 200, "openenv": 150}
STEPS = {"textarena": 40, "openenv": 60}
SEEDS = {"textarena": 2, "openenv": 0}
SHARED = (
    *("--apply-chat-template", "--rollout-shuffle", "--adam-beta2", "0.95", "--weight-decay", "0"),
    *("--device", "cpu", "--num-threads", "1", "--view", "plain"),
)


def warmup_flags(start: Path, save: Path, steps: int) -> list[str]:
    """Supervised fine-tuning on games, of which the player's moves are learned."""
    return [
        *("--hf-checkpoint", str(start), "--save", str(save), "--loss-type", "sft_loss"),
        *("--prompt-data", str(start / "warmup.jsonl"), "--input-key", "messages"),
        *("--rollout-batch-size", "64", "--num-rollout", str(steps), "--calculate-per-token-loss"),
        *("--lr", "3e-3", "--lr-warmup-iters", "20", "--disable-save-rollouts", *SHARED),
    ]


def grpo_flags(kind: str, start: Path, url: str, warm: Path, save: Path, steps: int) -> list[str]:
    """Flags of GRPO with the reward of the environment; the grader named here is never called."""
    return [
        *("--hf-checkpoint", str(warm), "--save", str(save), "--advantage-estimator", "grpo", "--rm-type", "exact"),
        *("--prompt-data", str(start / "train.jsonl"), "--input-key", "input"),
        *("--eval-prompt-data", "heldout", str(start / "heldout.jsonl"), "--eval-interval", str(steps)),
        *("--custom-generate-function-path", "multi_turn", "--generate-max-turns", "16"),
        *("--generate-environment", json.dumps(settings_of(kind, url)), "--rollout-max-response-len", "40"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--num-rollout", str(steps)),
        *("--lr", "1e-3", "--lr-warmup-iters", "2", "--lr-decay-style", "linear", *SHARED),
    ]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(KINDS)} [FOLDER]")
    kind = sys.argv[1]
    root = Path(sys.argv[2] if len(sys.argv) > 2 else f"runs/external_environments/{kind}")
    start, warmup, grpo = root / "start", root / "warmup", root / "grpo"
    train = [sys.executable, "-m", "miles.launch.main", "train"]
    with served() if kind == "openenv" else nullcontext("") as url:
        write_start(start, kind, url, DEMONSTRATIONS[kind], seed=SEEDS[kind])
        subprocess.run([*train, *warmup_flags(start, warmup, WARMUP_STEPS[kind])], check=True)
        subprocess.run([*train, *grpo_flags(kind, start, url, newest(warmup), grpo, STEPS[kind])], check=True)
    before, after = (row["eval/heldout/reward"] for row in measured(grpo, "eval"))
    print(f"{kind}: {before:.2f} held out before GRPO, {after:.2f} after")


if __name__ == "__main__":
    main()
