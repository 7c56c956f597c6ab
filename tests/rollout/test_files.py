"""Rows of prompt files: slices as Python slices, errors that name the line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core.errors import DataError, UsageError
from miles.rollout.files import named_paths, read_rows, split_slice

ROWS = [{"input": f"question {i}", "label": i} for i in range(7)]
BOUND = st.none() | st.integers(-9, 9)


@pytest.fixture(scope="module", params=["jsonl", "parquet"])
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / f"data.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@settings(max_examples=60, deadline=None)
@given(start=BOUND, stop=BOUND)
def test_a_slice_of_a_file_is_the_slice_of_its_rows(file, start, stop):
    path = f"{file}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = list(enumerate(ROWS))[start:stop]
    if expected:
        assert [(row.index, row.columns) for row in read_rows(path)] == expected
    else:
        with pytest.raises(DataError, match="holds no rows"):
            read_rows(path)


def test_a_path_without_a_slice_is_the_whole_file(file):
    assert [row.columns for row in read_rows(str(file))] == ROWS


@pytest.mark.parametrize("inside", ["1", "", "a:b", "1:2:3", "1.5:2", ":,"])
def test_a_slice_that_is_not_two_bounds_is_refused(inside):
    with pytest.raises(UsageError, match="two row numbers"):
        split_slice(f"data.jsonl@[{inside}]")


def test_an_at_sign_alone_is_part_of_the_path():
    assert split_slice("a@b/data.jsonl") == ("a@b/data.jsonl", slice(None))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"input": "a"}\n\n{"input": \n', r"data\.jsonl, line 3: this is not JSON"),
        (b'{"input": "a"}\n[1]\n', r"line 2: a row is a JSON object, and this is a list"),
        (b'{"input": "\xff"}\n', "line 1: this is not JSON"),
        (b"\n  \n", "holds no rows"),
        (b"", "holds no rows"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, complaint):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        read_rows(str(path))


def test_unusual_line_separators_inside_text_do_not_end_a_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", newline="")
    assert read_rows(str(path))[0].columns == {"input": "a\u2028b\x85c"}


def test_missing_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("a,b")
    (tmp_path / "data.parquet").write_text("not parquet")
    for name, complaint in [
        ("absent.jsonl", "There is no prompt file"),
        ("data.csv", r"must end in \.jsonl or \.parquet"),
        ("data.parquet", "cannot be read as Parquet"),
    ]:
        with pytest.raises(DataError, match=complaint):
            read_rows(str(tmp_path / name))


def test_held_out_sets_come_as_pairs_with_their_own_names():
    assert named_paths(("easy", "a.jsonl", "hard", "b.jsonl@[:5]")) == {"easy": "a.jsonl", "hard": "b.jsonl@[:5]"}
    assert named_paths(()) == {}
    with pytest.raises(UsageError, match="pairs of a name and a file"):
        named_paths(("easy", "a.jsonl", "b.jsonl"))
    with pytest.raises(UsageError, match="names the set easy twice"):
        named_paths(("easy", "a.jsonl", "easy", "b.jsonl"))
