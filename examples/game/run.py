"""Teach a small model to win at Nim: a warm-up on random games, then GRPO on its own.

python examples/game/run.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from nim import write_start
from training_runs import run_stages

WARMUP_STEPS = 50
STEPS = 40
NIM = f"{Path(__file__).parent.resolve() / 'nim.py'}:Nim"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the environment says who won."""
    means = stage_flags.in_turns(12, "--generate-environment", NIM)
    return [
        "--hf-checkpoint",
        str(warm),
        *stage_flags.grpo(start, save, steps, prompts=12),
        *means,
    ]


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/game")
    write_start(root / "start")
    run_stages(root, warmup_flags, grpo_flags, ("heldout",))


if __name__ == "__main__":
    main()
