"""Teach a small model to win at Nim: a warm-up on games that are played poorly, then GRPO on its own.

python examples/game/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from nim import write_start
from training_runs import run_example

WARMUP_STEPS = 400
STEPS = 60
NIM = f"{Path(__file__).parent.resolve() / 'nim.py'}:Nim"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the environment says who won."""
    means = stage_flags.in_turns(12, "--generate-environment", NIM)
    stage = stage_flags.grpo(start, save, steps, prompts=12, samples=32, lr=1e-3)
    return ["--hf-checkpoint", str(warm), *stage, *means]


def main() -> None:
    run_example("game", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
