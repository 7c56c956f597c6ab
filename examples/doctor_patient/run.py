"""Let a doctor and a patient learn from each other: one warm-up for both, then two policies in one run.

python examples/doctor_patient/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from cases import write_start
from training_runs import run_example

WARMUP_STEPS = 800
STEPS = 60
VISIT = f"{Path(__file__).parent.resolve() / 'visit.py'}:visit"


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """Both start from the same weights, and each has its own from then on; a reply is one word."""
    policies = {"doctor": {"hf_checkpoint": str(warm)}, "patient": {"hf_checkpoint": str(warm)}}
    return [
        *("--policies", json.dumps(policies), "--custom-cast-function-path", VISIT),
        *stage_flags.grpo(start, save, steps, samples=16, max_response_len=4),
    ]


def main() -> None:
    run_example("doctor_patient", write_start, warmup_flags, grpo_flags, roles=("doctor", "patient"))


if __name__ == "__main__":
    main()
