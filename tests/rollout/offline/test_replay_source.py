"""Groups that were written down, in place of prompts and answers."""

import asyncio
from dataclasses import replace

import pytest
from tests.observe.example_events import group, samples, taken

from miles.core.errors import DataError
from miles.observe.config import format_step_path
from miles.observe.rollout_reader import VOCABULARY
from miles.observe.rollouts import step_path, write_step
from miles.rollout.offline.replay_source import ReplaySource, RolloutRecording


def write(folder, steps=3, **more):
    folder.mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        write_step(step_path(folder, step), taken(step, [group(10 * step + n, [0.0, 1.0]) for n in range(2)]), **more)
    return folder


def recorded(folder, **more):
    how = {"steps": range(1, 4), "num_groups": 2, "num_trajectories": 2, "vocabulary": None} | more
    return ReplaySource(RolloutRecording(str(folder)), **how)


def drawn(source, count):
    prompts = [source.next() for _ in range(count)]
    return [asyncio.run(source.produce(prompt)).prompt.id for prompt in prompts]


def test_groups_come_in_their_order_from_the_step_a_run_stands_at(tmp_path):
    write(tmp_path)
    assert drawn(recorded(tmp_path), 6) == [10, 11, 20, 21, 30, 31]
    assert drawn(recorded(tmp_path, steps=range(2, 4)), 4) == [20, 21, 30, 31] and len(recorded(tmp_path)) == 6


def test_a_prompt_that_comes_twice_has_each_time_its_own_group(tmp_path):
    both = [group(5, [0.0, 1.0], length=2), group(5, [1.0, 0.0], length=4)]
    write_step(step_path(tmp_path, 1), taken(1, both))
    source = recorded(tmp_path)
    made = [asyncio.run(source.produce(prompt)) for prompt in [source.next(), source.next()]]
    assert [one.trajectories[0].response_length for one in made] == [2, 4]


def test_rows_that_waited_are_found_in_the_steps_they_were_taken_by(tmp_path):
    write(tmp_path)
    later = [group(10 * 3 + n, [0.0, 1.0]) for n in range(2)]
    probe = tuple(samples(later[1]))
    event = taken(1, [group(10, [0.0, 1.0]), group(11, [0.0, 1.0])])
    write_step(step_path(tmp_path, 1), replace(event, batch=replace(event.batch, probe=probe)))
    found = recorded(tmp_path).probe(1, samples)
    assert [(row.prompt_id, row.trajectory) for row in found] == [(31, 0), (31, 1)]
    step_path(tmp_path, 3).unlink()
    assert recorded(tmp_path).probe(1, samples) == ()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"num_groups": 3}, "holds 2 groups, and a step of this run has 3; give --rollout-batch-size 2"),
        (
            {"num_trajectories": 4},
            "holds 2 trajectories for prompt 10, and this run has 4; give --n-samples-per-prompt 2",
        ),
        ({"vocabulary": "other"}, "tokens of another vocabulary"),
        ({"needs": ("routed_experts",)}, "was written without routed_experts, which this run replays"),
    ],
)
def test_steps_this_run_cannot_train_on_are_refused(tmp_path, more, expected):
    write(tmp_path, file_metadata={VOCABULARY: "ours"}, excluded_extras=("routed_experts",))
    with pytest.raises(DataError, match=expected):
        recorded(tmp_path, **more).next()


def test_a_run_a_folder_and_a_name_with_a_blank_lead_to_the_same_files(tmp_path):
    write(tmp_path / "rollouts")
    ways = (tmp_path, tmp_path / "rollouts", tmp_path / "rollouts" / "step-{rollout_id:06d}.parquet")
    assert {RolloutRecording(str(way)).path(2) for way in ways} == {step_path(tmp_path / "rollouts", 2)}
    assert (
        RolloutRecording(str(tmp_path)).available_steps() == [1, 2, 3]
        and RolloutRecording(str(tmp_path)).missing(range(2, 6)) == 4
    )


@pytest.mark.parametrize("word", ["{step}", "{}", "{rollout_id.x}"])
def test_a_name_with_another_blank_is_refused(word):
    with pytest.raises(ValueError, match="is not known"):
        format_step_path(word, 1)
