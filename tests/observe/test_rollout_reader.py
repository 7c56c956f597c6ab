"""A step's file holds its groups whole: what is read back is what was written."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.example_events import group, span, taken, trajectory
from tests.tiers import examples

from miles.core.errors import DataError
from miles.core.serialization import CORE_TYPES, Codec
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.observe.rollout_reader import VOCABULARY, read_step_rollouts
from miles.observe.rollouts import compute_sample_digest, write_step

CODEC = Codec(CORE_TYPES)
words = st.text(max_size=8)
numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.booleans() | st.none() | words
values = st.recursive(numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))
metadata = st.dictionaries(words, values, max_size=3)


@st.composite
def spans(draw):
    author, length = draw(st.sampled_from(list(Author))), draw(st.integers(0, 4))
    written = author is Author.POLICY
    floats = st.floats(-50, 0, width=32)
    extras = {"routed_experts": np.arange(length * 6, dtype=np.uint8).reshape(length, 3, 2)}
    return Span(
        author=author,
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32),
        logprobs=np.array(draw(st.lists(floats, min_size=length, max_size=length)), np.float32) if written else None,
        version=Version(draw(st.sampled_from(["actor", "judge"])), draw(st.integers(-1, 9))) if written else None,
        extras=extras if draw(st.booleans()) else {},
    )


@st.composite
def trajectories(draw, index):
    branches = draw(st.lists(st.lists(spans(), max_size=4).map(tuple), min_size=1, max_size=3))
    parts = draw(st.dictionaries(words, st.floats(-5, 5), max_size=2))
    return Trajectory(
        branches=tuple(branches),
        status=draw(st.sampled_from(list(Status))),
        reward=draw(st.none() | st.floats(-5, 5).map(lambda value: Reward(value=value, parts=parts))),
        index=index,
        metadata=draw(metadata),
    )


@st.composite
def groups(draw, number):
    prompt = Prompt(
        id=draw(st.integers(0, 2**50)),
        messages=draw(st.lists(st.dictionaries(words, values, max_size=2), max_size=2)),
        label=draw(st.none() | words),
        epoch=number,
        metadata=draw(metadata),
    )
    return Group(prompt=prompt, trajectories=tuple(draw(trajectories(i)) for i in range(draw(st.integers(1, 3)))))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_groups_are_read_back_to_the_bit(data, tmp_path_factory):
    made = [data.draw(groups(number)) for number in range(data.draw(st.integers(1, 3)))]
    event = replace(taken(7, []), tickets=tuple(range(5, 5 + len(made))), groups=tuple(made))
    path = tmp_path_factory.mktemp("dump") / "one.parquet"
    write_step(path, event)
    read = read_step_rollouts(path)
    assert (read.step, read.tickets, read.lost) == (7, event.tickets, {})
    assert CODEC.pack("groups", read.groups) == CODEC.pack("groups", tuple(made))


def test_what_cannot_be_written_is_named_and_all_else_kept(tmp_path):
    odd = trajectory(0, 1.0, text="seven", shape=np.arange(3), sandbox=object())
    write_step(tmp_path / "a", taken(1, [Group(prompt=Prompt(id=1, messages=[]), trajectories=(odd,))]))
    read = read_step_rollouts(tmp_path / "a")
    assert read.lost == {"sandbox": "object"}
    kept = read.groups[0].trajectories[0].metadata
    assert kept["text"] == "seven" and kept["shape"].tolist() == [0, 1, 2] and "sandbox" not in kept


def test_extras_can_be_left_out_and_the_file_says_so(tmp_path):
    tokens = span(Author.POLICY, [5, 6], 3)
    routed = replace(tokens, extras={"routed_experts": np.zeros((2, 4), np.uint8), "top_tokens": np.zeros((2, 1))})
    one = Group(prompt=Prompt(id=1, messages=[]), trajectories=(trajectory(0, 1.0, branches=((routed,),)),))
    event = replace(taken(1, []), tickets=(1,), groups=(one,))
    write_step(tmp_path / "a", event, excluded_extras=("routed_experts",), file_metadata={VOCABULARY: "abc"})
    read = read_step_rollouts(tmp_path / "a")
    (kept,) = read.groups[0].trajectories[0].spans
    assert (
        set(kept.extras) == {"top_tokens"} and read.excluded_extras == ("routed_experts",) and read.vocabulary == "abc"
    )


def test_rows_that_were_only_looked_at_are_named_by_their_digest(tmp_path):
    event, later = taken(1, [group(1, [0.5])]), taken(2, [group(9, [0.5])])
    write_step(tmp_path / "a", replace(event, batch=replace(event.batch, probe=later.batch.samples)))
    (row,) = later.batch.samples
    assert read_step_rollouts(tmp_path / "a").probe == ((9, 0, compute_sample_digest(row)),)


def test_a_file_of_an_earlier_form_is_refused_by_name(tmp_path):
    table = pa.table({"step": [1]}).replace_schema_metadata({"miles.rollouts": "1"})
    pq.write_table(table, tmp_path / "old.parquet")
    with pytest.raises(DataError, match=r"old.parquet has format 1, which lacks parts of a group"):
        read_step_rollouts(tmp_path / "old.parquet")
    pq.write_table(pa.table({"step": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="is not a rollout dump"):
        read_step_rollouts(tmp_path / "other.parquet")


def test_a_file_with_a_column_missing_is_refused_by_name(tmp_path):
    write_step(tmp_path / "a", taken(1, [group(1, [0.5])]))
    table = pq.read_table(tmp_path / "a")
    assert json.loads(table.schema.metadata[b"probe"]) == []
    pq.write_table(table.drop_columns(["span_lengths"]), tmp_path / "b")
    with pytest.raises(DataError, match="does not hold complete groups: 'span_lengths'"):
        read_step_rollouts(tmp_path / "b")


def test_a_file_that_does_not_tell_policies_is_read_all_the_same(tmp_path):
    path, one = tmp_path / "step-000001.parquet", group(3, [0.0, 1.0])
    write_step(path, taken(1, [one]))
    pq.write_table(pq.read_table(path).drop_columns(["policy"]), path)
    assert [each.reward.value for each in read_step_rollouts(path).groups[0].trajectories] == [0.0, 1.0]
