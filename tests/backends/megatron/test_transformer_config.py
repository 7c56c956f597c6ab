"""Recompute and overlap flags as Megatron's own TransformerConfig has them after they were given."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import layout

from miles.backends.megatron.config import build_recompute_flags
from miles.core.errors import UsageError
from miles.launch.plan.layout_memory import get_recompute_layers, get_recompute_mode
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

# What else Megatron wants with a flag, and the layout it is for.
WITH: dict[str, str] = {
    "recompute_granularity": "--recompute-method block --recompute-num-layers 2",
    "recompute_method": "--recompute-granularity full --recompute-num-layers 2",
    "recompute_num_layers": "--recompute-granularity full --recompute-method block",
    "recompute_modules": "--recompute-granularity selective",
    "overlap_p2p_comm": "--virtual-pipeline-model-parallel-size 2 --batch-p2p-comm false",
    "overlap_p2p_comm_warmup_flush": (
        "--virtual-pipeline-model-parallel-size 2 --overlap-p2p-comm --batch-p2p-comm false"
    ),
    "ep_overlap_early_attn_memory_release": "--overlap-moe-expert-parallel-comm",
}
VALUES: dict[str, tuple[str, Any]] = {
    "recompute_granularity": ("full", "full"),
    "recompute_method": ("block", "block"),
    "recompute_num_layers": ("2", 2),
    "recompute_modules": ("core_attn layernorm", ["core_attn", "layernorm"]),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "overlap_p2p_comm": {"pipeline": 2},
    "overlap_p2p_comm_warmup_flush": {"pipeline": 2},
    "overlap_moe_expert_parallel_comm": {"shard": 2, "expert": 2},
    "ep_overlap_early_attn_memory_release": {"shard": 2, "expert": 2},
}
REWRITTEN = "moe_layer_recompute"
"""An older name, which Megatron itself turns into others: see below."""


def names() -> list[str]:
    """Of the installed release, every field about recomputation and overlap."""
    if find_spec("megatron") is None:
        return []
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import MLATransformerConfig

    found = [f.name for f in fields(MLATransformerConfig)]
    return [name for name in found if "recompute" in name or "overlap" in name]


def build(kind: str, sizes: dict[str, Any], line: str) -> Any:
    from miles.backends.megatron.flags import parse_flags
    from miles.backends.megatron.transformer_config import build_transformer_config

    fields, spec = parse_flags(line.split()), spec_from_config(cases.KINDS[kind])
    return build_transformer_config(spec, layout(sizes), fields, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name in names() if name != REWRITTEN])
def test_every_flag_of_recomputation_and_overlap_reaches_megatrons_config(name: str):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    default = getattr(MLATransformerConfig, name, None)
    word, value = VALUES.get(name, (str(not default).lower(), not default))
    kind = "qwen2_moe" if name.startswith(("moe_", "overlap_moe", "ep_overlap")) else "qwen3"
    flag = f"--{name.replace('_', '-')}"
    config = build(kind, LAYOUTS.get(name, {}), f"{flag} {word} {WITH.get(name, '')}")
    assert isinstance(config, TransformerConfig) and getattr(config, name) == value != default


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, (None, None, None)),
        ({"gradient_checkpointing": True}, ("full", "uniform", 1)),
        ({"recompute_granularity": "full"}, ("full", "uniform", 1)),
        ({"recompute_granularity": "selective"}, ("selective", None, None)),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            ("full", "block", 3),
        ),
    ],
)
def test_our_flags_of_recomputation_are_megatrons(options: dict[str, Any], fields: tuple[Any, ...]):
    train = TrainConfig(**options)
    flags = build_recompute_flags(get_recompute_mode(train), get_recompute_layers(train))
    config = build("qwen3", {}, " ".join(flags))
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == fields


def test_an_older_name_is_rewritten_by_megatron():
    config = build("qwen3_moe", {}, f"--{REWRITTEN.replace('_', '-')}")
    assert config.recompute_granularity == "selective" and "moe" in config.recompute_modules


def test_what_megatron_rejects_is_an_error_with_its_reason():
    with pytest.raises(UsageError, match=r"Megatron-Core rejects .*recompute"):
        build("qwen3", {}, "--recompute-granularity full --recompute-method uniform")
