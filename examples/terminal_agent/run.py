"""Teach a small model to look before it acts in a terminal: a warm-up on demonstrations, then GRPO.

python examples/terminal_agent/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from terminal import write_start
from training_runs import run_example

WARMUP_STEPS = 300
STEPS = 24
TERMINAL = f"{Path(__file__).parent.resolve() / 'terminal.py'}:Terminal"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the folder that is left decides."""
    means = stage_flags.in_turns(4, "--generate-environment", TERMINAL)
    return ["--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps, prompts=8, lr=3e-4), *means]


def main() -> None:
    run_example("terminal_agent", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
