"""A step's trajectories are on the disk as they were trained on."""

import numpy as np
import pytest
from tests.observe.example_events import group, span, story, taken, trajectory

from miles.core.errors import DataError
from miles.core.events import Saved, StepFinished
from miles.core.types import Author, Group, Prompt, TokenStats, Version
from miles.observe.rollouts import AUTHORS, RolloutDump, read_step, read_token_stats, step_path, write_step


def test_every_branch_is_a_row_with_its_tokens_and_advantages(tmp_path):
    branches = (
        (
            span(Author.PROMPT, [1, 2]),
            span(Author.POLICY, [7, 8], 3),
            span(Author.ENV, [9]),
            span(Author.POLICY, [5], 4),
        ),
        (span(Author.PROMPT, [1]), span(Author.POLICY, [6, 6, 6], 4)),
    )
    plain, split = trajectory(0, 0.25, text="seven"), trajectory(1, 1.0, branches=branches)
    one = Group(prompt=Prompt(id=7, messages=[], label="7", epoch=2), trajectories=(plain, split))
    path = step_path(tmp_path, 12)
    write_step(path, taken(12, [one]))
    rows = read_step(path)
    assert path.name == "step-000012.parquet" and len(rows) == 3
    assert [(r["trajectory"], r["branch"], r["status"]) for r in rows] == [
        (0, 0, "completed"),
        (1, 0, "completed"),
        (1, 1, "completed"),
    ]
    assert [r["text"] for r in rows] == ["seven", None, None]
    assert {(r["step"], r["ticket"], r["prompt_id"], r["epoch"], r["label"]) for r in rows} == {(12, 12, 7, 2, "7")}
    assert [r["reward"] for r in rows] == [0.25, 1.0, 1.0] and rows[0]["reward_parts"] == {"right": 0.25}
    middle = rows[1]
    assert middle["tokens"].tolist() == [1, 2, 7, 8, 9, 5] and middle["tokens"].dtype == np.int32
    assert middle["versions"].tolist() == [-1, -1, 3, 3, -1, 4]
    assert middle["authors"].tolist() == [0, 0, 1, 1, 2, 1] and AUTHORS[Author.ENV] == 2
    assert middle["logprobs"].dtype == np.float32
    np.testing.assert_array_equal(middle["logprobs"][2:4], branches[0][1].logprobs)
    assert middle["advantages"].tolist() == [0, 0, 0.5, 0.5, 0, 0.5]


def test_a_row_tells_which_policy_wrote_it(tmp_path):
    words = (span(Author.PROMPT, [1]), span(Author.POLICY, [5], 2))
    played = trajectory(0, 1.0, branches=(words, words), roles=["speaker", "listener"])
    silent = trajectory(2, 0.0, branches=((span(Author.PROMPT, [1]),),))
    one = Group(prompt=Prompt(id=7, messages=[]), trajectories=(played, trajectory(1, 1.0), silent))
    write_step(step_path(tmp_path, 1), taken(1, [one]))
    assert [row["policy"] for row in read_step(step_path(tmp_path, 1))] == ["speaker", "listener", "actor", None]


def test_the_same_prompt_twice_in_a_batch_keeps_its_own_advantages(tmp_path):
    groups = [group(3, [0.0, 1.0], length=2), group(3, [0.0, 1.0], length=4)]
    write_step(step_path(tmp_path, 1), taken(1, groups))
    rows = read_step(step_path(tmp_path, 1))
    assert [len(r["advantages"]) for r in rows] == [4, 4, 6, 6] == [len(r["tokens"]) for r in rows]


def test_a_trajectory_credit_left_out_has_no_advantages(tmp_path):
    event = taken(1, [group(3, [0.0, 1.0])])
    from dataclasses import replace

    fewer = replace(event, batch=replace(event.batch, samples=event.batch.samples[:1]))
    write_step(step_path(tmp_path, 1), fewer)
    assert [r["advantages"] is None for r in read_step(step_path(tmp_path, 1))] == [False, True]


def finished(event, samples):
    """The end of a step, with -1, -2, ... as log-probs of each sample's trained tokens."""
    counts = [int(event.batch.samples[i].mask.sum()) for i in samples]
    logprobs = np.concatenate([-np.arange(1.0, n + 1) for n in counts]).astype(np.float32)
    stats = TokenStats(
        sample_indices=np.array(samples, np.int32),
        counts=np.array(counts, np.int32),
        logprobs=logprobs,
        entropies=logprobs / -10,
    )
    return StepFinished(step=event.step, version=Version(), metrics={}, token_stats=stats)


def test_the_trainers_logprobs_are_beside_the_tokens_they_are_of(tmp_path):
    event = taken(1, [group(3, [0.0, 1.0], length=2), group(3, [0.0, 1.0], length=4)])
    dump = RolloutDump(tmp_path, keep=1)
    dump(event)
    dump(finished(event, [3, 0, 2]))  # the order of micro-batches
    dump.commit()
    rows, found = read_step(step_path(tmp_path, 1)), read_token_stats(step_path(tmp_path / "trainer", 1))
    assert len(found) == 3 and (rows[1]["ticket"], 1, 0) not in found
    for row in (rows[0], rows[2], rows[3]):
        logprobs, entropies = found[row["ticket"], row["trajectory"], row["branch"]]
        trained = row["authors"] == 1
        assert len(logprobs) == len(row["tokens"]) and np.isnan(logprobs[~trained]).all()
        assert logprobs[trained].tolist() == [-(n + 1) for n in range(trained.sum())]
        np.testing.assert_allclose(entropies[trained], -logprobs[trained] / 10)
    dump(Saved(step=2, name="x"))
    dump.close()
    assert not list(tmp_path.rglob("*.parquet"))  # both are deleted


def test_a_row_has_the_seconds_of_its_trajectory(tmp_path):
    from dataclasses import replace

    times = {"started": 1e9, "generate": 2.5, "grade": 0.25}
    one = group(3, [0.0, 1.0])
    timed = replace(one, trajectories=(replace(one.trajectories[0], times=times), one.trajectories[1]))
    write_step(step_path(tmp_path, 1), taken(1, [timed]))
    rows = read_step(step_path(tmp_path, 1))
    assert [(r["started"], r["generate_seconds"], r["grade_seconds"]) for r in rows] == [(1e9, 2.5, 0.25), (None,) * 3]


def test_the_dump_writes_a_file_a_batch_and_leaves_nothing_unfinished(tmp_path):
    dump = RolloutDump(tmp_path)
    for event in story(3):
        dump(event)
    dump.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:06d}.parquet" for n in (1, 2, 3)]


def test_old_files_are_deleted_when_a_checkpoint_was_saved(tmp_path):
    dump = RolloutDump(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        dump(taken(step, [group(1, [0.0])]))
    dump.commit()
    assert len(list(tmp_path.iterdir())) == 5, "steps after the newest checkpoint are needed to resume"
    dump(Saved(step=4, name="step-000004"))
    dump.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:06d}.parquet" for n in (3, 4, 5)]


def test_writing_a_step_again_gives_the_same_content(tmp_path):
    event = taken(5, [group(1, [0.5, 0.25])])
    contents = []
    for _ in range(2):
        write_step(step_path(tmp_path, 5), event)
        contents.append([{k: np.asarray(v).tolist() for k, v in r.items()} for r in read_step(step_path(tmp_path, 5))])
    assert contents[0] == contents[1]


def test_a_dump_that_cannot_write_says_so_at_the_commit(tmp_path):
    dump = RolloutDump(tmp_path / "rollouts")
    (tmp_path / "rollouts").rmdir()
    dump(taken(1, [group(1, [0.0])]))
    with pytest.raises(FileNotFoundError):
        dump.commit()
    dump.close()


def test_a_file_that_is_no_dump_is_refused_by_name(tmp_path):
    (tmp_path / "step-000001.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="step-000001"):
        read_step(tmp_path / "step-000001.parquet")
