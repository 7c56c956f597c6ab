"""Tests of every kind of model: the default tier has one kind of each mechanism, the extended tier all of them."""

import pytest
from tests.models.oracle import KINDS

MECHANISMS = frozenset(
    [
        "qwen2 tied",
        "qwen3",
        "llama 3.1",
        "phi3 longrope, short",
        "gemma3 with a cap on logits",
        "gemma3n",
        "gemma4 with per-layer inputs",
        "gpt-oss",
        "qwen3 moe",
        "llama 4",
        "deepseek v3",
        "deepseek v4",
        "glm 5 shared choices",
        "minimax-m3",
        "mistral 4",
        "inkling",
        "lfm2",
        "hybrid qwen3 next",
        "hybrid qwen4",
        "hybrid nemotron h",
        "hybrid kimi linear",
    ]
)
assert KINDS.keys() >= MECHANISMS

each_kind = pytest.mark.parametrize(
    "kind", [kind if kind in MECHANISMS else pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS]
)
