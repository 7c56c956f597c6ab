"""Megatron's flags are parsed as its config declares them, and reserved fields are rejected."""

from importlib.util import find_spec

import pytest

from miles.core.errors import UsageError

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]


def parse_flags(line: str):
    from miles.backends.megatron.flags import parse_flags

    return parse_flags(tuple(line.split()))


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {}),
        ("--recompute-granularity full", {"recompute_granularity": "full"}),
        ("--recompute-num-layers=2", {"recompute_num_layers": 2}),
        ("--recompute-modules core_attn moe", {"recompute_modules": ["core_attn", "moe"]}),
        ("--use-distributed-optimizer", {"use_distributed_optimizer": True}),
        ("--moe-permute-fusion", {"moe_permute_fusion": True}),
        ("--no-bias-dropout-fusion", {"bias_dropout_fusion": False}),
        ("--bias-dropout-fusion false", {"bias_dropout_fusion": False}),
        ("--moe-expert-capacity-factor 1.5", {"moe_expert_capacity_factor": 1.5}),
        ("--decoder-last-pipeline-num-layers 3", {"num_layers_in_last_pipeline_stage": 3}),
        ("--moe-aux-loss-coeff 0.1", {"moe_aux_loss_coeff": 0.1}),
        ("--moe-router-freeze-gate", {"moe_router_freeze_gate": True}),
        ("--moe-router-dtype fp32 --moe-grouped-gemm", {"moe_router_dtype": "fp32", "moe_grouped_gemm": True}),
    ],
)
def test_a_flag_is_a_field_of_megatrons_config(line: str, fields: dict):
    assert parse_flags(line) == fields


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--recompute-granularty full", "did you mean --megatron-recompute-granularity"),
        ("--bananas 3", "--megatron-bananas is not a field"),
        ("--num-layers 3", "follows from config.json"),
        ("--tensor-model-parallel-size 2", "without its megatron- prefix"),
        ("--bf16", "--dtype"),
        ("--calculate-per-token-loss", "gradients are sums"),
        ("--recompute-num-layers many", "--megatron-recompute-num-layers many"),
        ("--recompute-num-layers", "expected one value"),
        ("--moe-router-dtype fp13", "expected one of"),
        ("--init-method normal", "cannot be given on a command line"),
        ("full", "does not follow a --megatron- flag"),
    ],
)
def test_a_mistake_is_named_with_its_fix(line: str, said: str):
    with pytest.raises(UsageError, match=said):
        parse_flags(line)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(UsageError) as raised:
        parse_flags("--bananas 3 --num-layers 2 --recompute-granularity full")
    assert len(raised.value.problems) == 2
