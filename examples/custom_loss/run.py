"""Train the small player of examples/game with a loss of one's own.

python examples/custom_loss/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "game"))
import nim
import stage_flags
from nim import write_start
from training_runs import run_example

WARMUP_STEPS = 400
STEPS = 40
NIM = f"{Path(nim.__file__).resolve()}:Nim"
LOSS = f"{Path(__file__).parent.resolve() / 'losses.py'}:spo"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Group-relative advantages with the loss of ``losses.py``, in two updates a step: in the second, ratios differ."""
    return [
        *("--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps, prompts=12, samples=16, lr=2e-3)),
        *("--loss-type", "custom_loss", "--custom-loss-function-path", LOSS, "--num-steps-per-rollout", "2"),
        *stage_flags.in_turns(12, "--generate-environment", NIM),
    ]


def main() -> None:
    run_example("custom_loss", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
