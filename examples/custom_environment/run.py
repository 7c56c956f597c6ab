"""Teach a small model its way in an environment of one's own: a warm-up on poor walks, then GRPO on its own.

python examples/custom_environment/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from corridor import write_start
from training_runs import run_example

WARMUP_STEPS = 60
STEPS = 30
CORRIDOR = f"{Path(__file__).parent.resolve() / 'corridor.py'}:Corridor"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO on what the environment pays."""
    means = stage_flags.in_turns(12, "--generate-environment", CORRIDOR)
    return ["--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps, lr=2e-3), *means]


def main() -> None:
    run_example("custom_environment", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
