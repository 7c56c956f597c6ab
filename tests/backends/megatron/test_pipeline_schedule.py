"""Micro-batches in flight on pipeline stages, and what the plan says of them, against Megatron's own schedules."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.backends.megatron import cases
from tests.backends.megatron.pipeline_cases import LENGTH, PipelineCase, watch_all
from tests.pool import ranks

from miles.backends.megatron.pipeline_schedule import PipelineSchedule, PipelineStep
from miles.backends.megatron.rank_memory import MegatronMemoryFlags, parse_memory_flags
from miles.cluster.parallel_dims import ParallelDims
from miles.launch.plan.pipeline_memory import (
    StepCounts,
    bound_step_counts,
    estimate_stage_activations,
    list_stage_steps,
)
from miles.models.accounting.known_models import load_known_models
from miles.models.families import spec_from_config
from miles.train.balance import partition_micro_batches
from miles.train.config import TrainConfig

INTERLEAVED = ("--virtual-pipeline-model-parallel-size", "2")
AGAIN = {"gradient_checkpointing": True}
TWO = [
    PipelineCase(kind="qwen3 untied", count=4),
    PipelineCase(kind="qwen3 untied", count=1),
    PipelineCase(kind="qwen3", count=3, train=AGAIN),
    PipelineCase(kind="qwen3", count=3, train={"recompute_granularity": "selective"}),
    PipelineCase(kind="qwen3 untied", count=6, flags=INTERLEAVED),
    PipelineCase(kind="qwen3 untied", count=3, flags=INTERLEAVED),
    PipelineCase(kind="qwen3 untied", count=4, flags=INTERLEAVED, train=AGAIN),
    PipelineCase(kind="llama", count=4, flags=("--num-layers-in-first-pipeline-stage", "1")),
    PipelineCase(kind="deepseek_v3", count=4),
]
FOUR = [
    PipelineCase(kind="qwen3 untied", count=6, layout={"pipeline": 4}),
    PipelineCase(kind="qwen3 untied", count=2, layout={"pipeline": 4}),
]


@pytest.mark.megatron
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]")
@pytest.mark.parametrize("world", [2, 4])
def test_a_stage_holds_the_micro_batches_that_the_plan_says_and_no_more_bytes(tmp_path: Path, world: int):
    watched = {2: TWO, 4: FOUR}[world]
    for kind in {case.kind for case in watched}:
        cases.written(tmp_path / kind.replace(" ", "_"), kind)
    reported = ranks(world, watch_all, tmp_path, watched)
    for rank, of_rank in enumerate(reported):
        for case, found in zip(watched, of_rank, strict=True):
            spec, flags = spec_from_config(cases.KINDS[case.kind]), parse_memory_flags(case.flags)
            layout, counts = ParallelDims(world=world, **case.layout), StepCounts(micro_batches=case.count)
            held = [step.held for step in list_stage_steps(layout, rank, flags, counts)]
            where = f"{case} on rank {rank}"
            assert max(map(sum, held)) == max(map(sum, found.in_flight)), where
            assert list(map(max, zip(*held, strict=True))) == list(map(max, zip(*found.in_flight, strict=True))), where
            planned = estimate_stage_activations(
                spec, layout, "float32", LENGTH, case.config, stage=rank, flags=flags, counts=counts, fused=False
            )
            assert max(found.saved, found.alive) <= planned, where
            if not case.train:
                wide = max(sum(n * size for n, size in zip(found.passes, each, strict=True)) for each in held)
                # Beside it what is saved of positions, and of the loss; idle micro-batches have another's positions.
                assert 0.99 * wide <= found.saved, where
                assert found.saved < 1.15 * wide or rank == world - 1, where


def test_the_inputs_of_recomputed_layers_are_there_for_each_micro_batch_in_flight():
    spec, tokens = spec_from_config(load_known_models()["Qwen3-8B"]), 16384
    layout, flags = ParallelDims(world=4, pipeline=4), MegatronMemoryFlags()

    def count(stage: int, batches: int, flags: MegatronMemoryFlags = flags, **more: int) -> int:
        counts, train = StepCounts(micro_batches=batches, **more), TrainConfig(gradient_checkpointing=True)
        return estimate_stage_activations(
            spec, layout, "bfloat16", tokens, train, stage=stage, flags=flags, counts=counts, fused=True
        )

    each = 9 * tokens * spec.hidden_size * 2  # of 36 layers in four stages
    assert [count(stage, 8) - count(stage, 1) for stage in range(4)] == [3 * each, 2 * each, each, 0]
    assert count(0, 2) - count(0, 1) == count(0, 8, tokens=2 * tokens) - count(0, 1) == each
    # By hand: 15 of virtual stages of 3 layers in place of 9 layers, and a gradient that was sent to the last stage.
    interleaved = count(0, 8, MegatronMemoryFlags(virtual=3))
    assert interleaved - count(0, 1) == (15 * 3 - 9 + 1) * tokens * spec.hidden_size * 2


def test_stages_hold_fewer_micro_batches_the_later_they_are():
    steps = [PipelineSchedule(ranks=4, rank=rank).list_steps() for rank in range(4)]
    assert [max(step.held[0] for step in each) for each in steps] == [4, 3, 2, 1]
    assert PipelineSchedule(ranks=4, rank=0).list_steps(1) == [PipelineStep((1,), 0)]


def test_interleaved_stages_hold_more_than_others():
    """Narayanan et al. 2021: with V virtual stages of a rank, (1 + (P - 1) / (P V)) times as much."""
    for ranks_, virtual in ((2, 2), (4, 2), (4, 4), (8, 3)):
        steps = PipelineSchedule(ranks=ranks_, rank=0, virtual=virtual).list_steps(8 * ranks_)
        held = max(sum(step.held) for step in steps)
        assert held == ranks_ * virtual + ranks_ - 1


def test_a_long_step_holds_what_every_longer_one_does():
    for group in (None, 3):
        schedule = PipelineSchedule(ranks=3, rank=1, virtual=2, group=group)
        assert set(schedule.list_steps(3000)) == set(schedule.list_steps(300))
        assert {step.held for step in schedule.list_steps(300)} <= {step.held for step in schedule.list_steps()}


@pytest.mark.parametrize(("ranks_", "budget"), [(1, 10), (2, 10), (3, 16), (4, 40)])
def test_a_step_has_no_more_micro_batches_than_bounded(ranks_: int, budget: int):
    worst = [6] * 11, [10] * 11, [1] * 11, [4, 4, 4, 4, 7, 7, 7, 7, 10, 1, 1]
    for lengths in worst:
        for balanced in (True, False):
            bound = bound_step_counts(len(lengths), 10, ranks_, budget).micro_batches
            parts = partition_micro_batches(lengths, dp_size=ranks_, budget=budget, balanced=balanced)
            assert bound is not None and len(parts[0]) <= bound
            bound = bound_step_counts(len(lengths), 10, ranks_, budget, samples_each=2).micro_batches
            parts = partition_micro_batches(lengths, dp_size=ranks_, budget=budget, count=2, balanced=balanced)
            assert bound == len(parts[0])
