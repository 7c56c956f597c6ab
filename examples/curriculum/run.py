"""Win at Nim against an opponent that makes no mistake, from small piles to large ones.

python examples/curriculum/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parents[1] / "game"))
import nim
import stage_flags
from training_runs import run_example

WARMUP_STEPS = 400
STEPS = 60
PARTS = {"one_move": range(1, 4), "two_moves": range(5, 8), "three_moves": range(9, 12)}
"""Piles by the number of right moves that win them; a multiple of four is lost."""
NIM = f"{Path(nim.__file__).resolve()}:Nim"
LESSONS = f"{Path(__file__).parent.resolve() / 'lessons.py'}:harder_when_ready"


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096) -> None:
    """The game's model and demonstrations, with a file of prompts for each part."""
    nim.write_start(folder, skill=1.0, parts=dict(PARTS), seed=seed, demonstrations=demonstrations)


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO on what the curriculum chooses."""
    means = stage_flags.in_turns(12, "--generate-environment", NIM, "--curriculum-path", LESSONS)
    stage = stage_flags.grpo(start, save, steps, prompts=12, samples=16, lr=1e-3, parts=[*PARTS])
    return ["--hf-checkpoint", str(warm), *stage, *means]


def main() -> None:
    run_example("curriculum", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
