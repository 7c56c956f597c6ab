"""Teach a small model to follow a trail through documents: a warm-up on demonstrations, then GRPO.

python examples/search_agent/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from trail import write_start
from training_runs import run_example

WARMUP_STEPS = 250
STEPS = 30


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the right number is worth 1, however many searches it took."""
    documents = ("--generate-tools", "search", "--search-documents", str(start / "documents.jsonl"))
    means = stage_flags.in_turns(4, *documents, "--rm-type", "exact")
    return ["--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps), *means]


def main() -> None:
    run_example("search_agent", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
