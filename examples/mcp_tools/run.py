"""Teach a small model to choose between the tools of an MCP server: a warm-up on demonstrations, then GRPO.

python examples/mcp_tools/run.py [FOLDER [SEED]]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
import stage_flags
from shop import write_start
from training_runs import run_example

WARMUP_STEPS = 200
STEPS = 80


def warmup_flags(start: Path, save: Path, steps: int = WARMUP_STEPS) -> list[str]:
    return stage_flags.warmup(start, save, steps)


def grpo_flags(start: Path, warm: Path, save: Path, steps: int = STEPS) -> list[str]:
    """GRPO; the right number is worth 1."""
    server = ("--generate-tools", "mcp:shop", "--mcp-servers", str(start / "servers.json"))
    means = stage_flags.in_turns(3, *server, "--rm-type", "exact")
    return ["--hf-checkpoint", str(warm), *stage_flags.grpo(start, save, steps, prompts=16, lr=6e-4), *means]


def main() -> None:
    run_example("mcp_tools", write_start, warmup_flags, grpo_flags)


if __name__ == "__main__":
    main()
