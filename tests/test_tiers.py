"""The lists of extended and slow tests name tests that exist."""

import ast
from functools import cache
from pathlib import Path

import pytest
from tests.tiers import EXTENDED_LIST, SLOW_LIST, examples, read_patterns

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", [EXTENDED_LIST, SLOW_LIST], ids=lambda path: path.stem)
def test_every_listed_test_exists(path: Path):
    missing = []
    for pattern in read_patterns(path):
        if set(pattern) & set("*?"):
            continue
        where, _, name = pattern.partition("::")
        file = ROOT / where
        if not file.is_file() or (name and name.split("[")[0] not in list_functions(file)):
            missing.append(pattern)
    assert not missing


@cache
def list_functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_default_run_caps_hypothesis_examples():
    assert examples(1) == 1
    assert examples(10_000) in (15, 10_000)
