"""Teach a small model to fix bugs in a repository: a warm-up on demonstrations, then GRPO against hidden tests.

python examples/coding_agent/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from repository import write_start
from training_runs import run_example

WARMUP_STEPS = 200
STEPS = 30
REPOSITORY = f"{Path(__file__).parent.resolve() / 'repository.py'}:Repository"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the hidden tests of the repository decide."""
    means = stage_flags.in_turns(4, "--generate-environment", REPOSITORY)
    return ["--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps, prompts=8, lr=3e-4), *means]


def main() -> None:
    run_example("coding_agent", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
