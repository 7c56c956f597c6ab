"""Let a researcher and a reader learn together: one warm-up for both, then two policies in one run.

python examples/deep_research/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from training_runs import run_example
from worlds import write_start

WARMUP_STEPS = 150
STEPS = 40
RESEARCH = f"{Path(__file__).parent.resolve() / 'research.py'}:research"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Both start from the same weights, and each has its own from then on; a reply is at most two words."""
    policies = {"researcher": {"hf_checkpoint": str(warm)}, "reader": {"hf_checkpoint": str(warm)}}
    return [
        *("--policies", json.dumps(policies), "--custom-cast-function-path", RESEARCH),
        *stage_flags.grpo(start, save, steps, max_response_len=4),
    ]


def main() -> None:
    run_example("deep_research", write_start, warmup_flags, grpo_flags, roles=("researcher", "reader"))


if __name__ == "__main__":
    main()
