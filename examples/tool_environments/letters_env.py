"""An environment of the package verifiers, as its hub has them: a module with ``load_environment``."""

from __future__ import annotations

import sys
from pathlib import Path

import verifiers as vf
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))
from environment import hidden  # the file beside this one


async def look_up(key: str) -> str:
    """The number behind two letters.

    Args:
        key: The two letters.
    """
    return hidden(key)


async def found(completion: list[vf.Message], answer: str) -> float:
    """1 for a last reply that is the number, and nothing else."""
    return float(completion[-1].content == answer)


def load_environment(max_turns: int = 4) -> vf.Environment:
    """A question, one tool, and a rubric; its own rows are a handful, since a run brings its prompts."""
    keys = ("ab", "cd", "ef")
    rows = [{"prompt": [{"role": "user", "content": key}], "answer": hidden(key)} for key in keys]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[look_up], rubric=vf.Rubric(funcs=[found]), max_turns=max_turns
    )
