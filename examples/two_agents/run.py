"""Let two small models invent a language: two policies in one run, each with its own weights, optimizer and credit.

python examples/two_agents/run.py [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from signals import LETTERS, write_start
from training_runs import measured

STEPS = 60


def policies(start: Path, **listener: object) -> str:
    """The value of ``--policies``: the speaker, which is the main one, and the listener with knobs of its own."""
    table = {
        "speaker": {"hf_checkpoint": str(start / "speaker")},
        "listener": {"hf_checkpoint": str(start / "listener"), **(listener or {"lr": 4e-3})},
    }
    return json.dumps(table)


def flags(start: Path, save: Path, steps: int = STEPS, *more: str, **listener: object) -> list[str]:
    """The run: 16 things a step, 16 attempts to tell each."""
    letters = [str(at) for at in range(len(LETTERS))]
    return [
        *("--policies", policies(start, **listener), "--save", str(save)),
        *("--custom-cast-function-path", f"{Path(__file__).parent / 'play.py'}:signal", "--apply-chat-template"),
        *("--prompt-data", str(start / "things.jsonl"), "--label-key", "label", "--rollout-shuffle"),
        *("--eval-prompt-data", "each", str(start / "each.jsonl"), "--n-samples-per-eval-prompt", "32"),
        *("--eval-interval", str(steps), "--rollout-batch-size", "16", "--n-samples-per-prompt", "16"),
        *("--rollout-max-response-len", "2", "--rollout-stop-token-ids", *letters, "--num-rollout", str(steps)),
        *("--advantage-estimator", "grpo", "--lr", "2e-3", "--lr-warmup-iters", "2", "--adam-beta2", "0.95"),
        *("--weight-decay", "0", "--device", "cpu", "--num-threads", "1", "--view", "plain", *more),
    ]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/two_agents")
    write_start(root / "start")
    subprocess.run(
        [sys.executable, "-m", "miles.launch.main", "train", *flags(root / "start", root / "run")], check=True
    )
    for role in ("speaker", "listener"):
        before, after = (row[f"eval/each/reward/{role}"] for row in measured(root / "run", "eval"))
        print(f"{role}: {before:.2f} of the things arrived before, {after:.2f} after")


if __name__ == "__main__":
    main()
