"""Parquet, Arrow and saved data sets: batch by batch, only what is asked for, and faults named with the file."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.dataset_files import write_arrow, write_parts, write_splits
from tests.tiers import examples

from miles.core.errors import DataError
from miles.rollout.data import arrow_reader
from miles.rollout.data.dataset import read_dataset
from miles.rollout.data.paths import count_rows, read_rows, resolve_files
from miles.rollout.data.schema import Columns

ROWS = [{"input": f"q{i}", "label": str(i), "metadata": {"level": i}, "big": "x" * 50} for i in range(10)]


def read(path, **keys):
    return read_dataset(str(path), **({"input_key": "input", "label_key": "label"} | keys))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_saved_data_set_is_read_in_the_order_of_its_shards(tmp_path, shards):
    found = read(write_parts(tmp_path / "saved", ROWS, shards=shards)).prompts
    assert [(p.id, p.label, p.messages[0]["content"]) for p in found] == [(i, str(i), f"q{i}") for i in range(10)]
    assert [dict(p.metadata) for p in found] == [{"level": i} for i in range(10)]


def test_files_beside_a_saved_data_set_that_it_does_not_list_are_left_alone(tmp_path):
    folder = write_parts(tmp_path / "saved", ROWS)
    write_arrow(folder / "cache-1234.arrow", ROWS)
    assert len(read(folder)) == 10


def test_splits_are_folders_and_must_be_named_where_there_are_several(tmp_path):
    folder = write_splits(tmp_path / "both", {"train": ROWS, "test": ROWS[:2]})
    assert (len(read(folder / "train")), len(read(folder / "test"))) == (10, 2)
    with pytest.raises(DataError, match=r"holds the splits train, test; name one, as in .*both/train"):
        read(folder)
    assert len(read(write_splits(tmp_path / "one", {"train": ROWS}))) == 10


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("state.json", "{", r"state\.json is not JSON"),
        ("state.json", "[]", "must hold an object"),
        ("state.json", '{"_data_files": 3}', "lists no data files"),
        ("state.json", '{"_data_files": []}', "without rows"),
        ("state.json", '{"_data_files": [{"filename": "gone.arrow"}]}', r"lists gone\.arrow, which is not there"),
        (
            "state.json",
            '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": [{"filename": "i"}]}',
            "keeps its order in a separate file",
        ),
        ("dataset_dict.json", '{"splits": []}', "lists no splits"),
        ("dataset_dict.json", '{"splits": ["train"]}', "lists the split train, which is not there"),
    ],
)
def test_a_broken_saved_data_set_is_told(tmp_path, name, content, complaint):
    folder = write_parts(tmp_path / "saved", ROWS)
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=complaint):
        read(folder)


def test_json_columns_are_objects_again_at_any_depth(tmp_path):
    chat = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"a": 1}]}]]
    table = pa.table(
        {
            "messages": pa.array([[json.dumps(m) for m in c] for c in chat], pa.list_(pa.string())).cast(
                pa.list_(pa.json_())
            ),
            "metadata": pa.array(['{"y": [1, null]}'], pa.string()).cast(pa.json_()),
            "label": pa.array([{"x": '"s"'}], pa.struct({"x": pa.string()})).cast(pa.struct({"x": pa.json_()})),
        }
    )
    (prompt,) = read(write_parts(tmp_path / "saved", table), input_key="messages").prompts
    assert list(prompt.messages) == chat[0]
    assert dict(prompt.metadata) == {"y": [1, None]}
    assert prompt.label == '{"x": "s"}'


def test_columns_nobody_asked_for_never_become_python_objects(tmp_path, monkeypatch):
    seen: list[list[str]] = []
    records = arrow_reader._records
    monkeypatch.setattr(arrow_reader, "_records", lambda batch: seen.append(batch.schema.names) or records(batch))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=4)
    write_arrow(tmp_path / "b.arrow", ROWS, batch=4)
    list(read_rows(str(tmp_path), Columns(input="input")))
    assert seen == [["input", "metadata"]] * 6


def test_row_groups_outside_a_slice_stay_on_disk(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    opened: list[int] = []
    batches = arrow_reader._group_batches
    monkeypatch.setattr(arrow_reader, "_group_batches", lambda f, o, n, c: opened.append(n) or batches(f, o, n, c))
    assert [row.index for row in read_rows(f"{tmp_path}/a.parquet@[3:7]")] == [3, 4, 5, 6]
    assert opened == [1, 2, 3]


# -- faults ---------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(keep=st.floats(0, 1, exclude_max=True), kind=st.sampled_from(["a.parquet", "stream.arrow", "file.arrow"]))
def test_a_file_cut_short_anywhere_is_refused_and_never_read_as_less(tmp_path_factory, keep, kind):
    folder = tmp_path_factory.mktemp("cut")
    if kind == "a.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), folder / kind)
    else:
        write_arrow(folder / kind, ROWS, stream=kind == "stream.arrow", batch=2)
    whole = (folder / kind).read_bytes()
    (folder / kind).write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(DataError, match=kind):
        read(folder / kind)
    with pytest.raises(DataError, match=kind):
        read(folder / kind, skip_bad_rows=True)


def test_a_stream_cut_between_two_batches_is_told_from_a_shorter_one(tmp_path):
    file = tmp_path / "data.arrow"
    write_arrow(file, ROWS, batch=5)
    file.write_bytes(file.read_bytes()[:-8])
    assert pa.ipc.open_stream(file.read_bytes()).read_all().num_rows == 10  # Arrow itself sees nothing wrong
    with pytest.raises(DataError, match=r"data\.arrow is truncated"):
        read(file)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_wrong_column_name_is_the_files_fault_and_never_skipped(tmp_path, suffix):
    file = tmp_path / f"data.{suffix}"
    pq.write_table(pa.Table.from_pylist(ROWS), file) if suffix == "parquet" else write_arrow(file, ROWS)
    for keys, flag in [({"input_key": "question"}, "--input-key"), ({"label_key": "answer"}, "--label-key")]:
        with pytest.raises(DataError, match=rf"data\.{suffix}: there is no column .* \(found: input, .*\); .*{flag}"):
            read(file, skip_bad_rows=True, **keys)
    assert len(read(file, metadata_key="absent")) == 10


def test_what_is_neither_parquet_nor_arrow_is_told(tmp_path):
    for name, kind in [("a.parquet", "Parquet"), ("b.arrow", "Arrow")]:
        (tmp_path / name).write_text("this is some text that is neither")
        with pytest.raises(DataError, match=f"cannot be read as {kind}"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow", "c.jsonl", "d.arrow"])
def test_files_without_rows_are_told(tmp_path, name):
    nothing = pa.table({"input": pa.array([], pa.string()), "label": pa.array([], pa.string())})
    if name == "a.parquet":
        pq.write_table(nothing, tmp_path / name)
    elif name == "b.arrow":
        write_arrow(tmp_path / name, nothing)
    else:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no rows|is empty"):
        read(tmp_path / name)


def test_one_row_of_broken_text_is_one_bad_row(tmp_path):
    raw = pa.array([b"fine", b"\xff\xfe", b"also fine"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    write_arrow(tmp_path / "a.arrow", pa.table({"input": broken, "label": pa.array(["1", "2", "3"])}))
    with pytest.raises(DataError, match=r"a\.arrow, row 2: this row cannot be read"):
        read(tmp_path / "a.arrow")
    found = read(tmp_path / "a.arrow", skip_bad_rows=True)
    assert [(p.id, p.label) for p in found.prompts] == [(0, "1"), (2, "3")]
    assert found.skipped == 1


def test_rows_are_counted_without_being_read(tmp_path: Path):
    folder = write_parts(tmp_path / "saved", ROWS, shards=3)
    assert count_rows(str(folder)) == 10
    assert [file.name for file in resolve_files(str(folder))] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
