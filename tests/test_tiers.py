"""The list of extended tests names tests that exist."""

import ast
from pathlib import Path

from tests.tiers import examples, read_extended_patterns

ROOT = Path(__file__).parents[1]


def test_every_extended_test_exists():
    missing = []
    for pattern in read_extended_patterns():
        if set(pattern) & set("*?"):
            continue
        path, _, name = pattern.partition("::")
        file = ROOT / path
        functions = (
            {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
            if file.is_file()
            else set()
        )
        if not file.is_file() or (name and name.split("[")[0] not in functions):
            missing.append(pattern)
    assert not missing


def test_the_default_run_caps_hypothesis_examples():
    assert examples(1) == 1
    assert examples(10_000) in (15, 10_000)
