"""Rows of prompt files: slices as Python slices, folders and globs in order, errors that name the line."""

import json
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.dataset_files import write_arrow, write_parts
from tests.tiers import examples

from miles.core.errors import DataError, UsageError
from miles.rollout.data.paths import (
    DataEntry,
    count_rows,
    parse_entries,
    parse_entry,
    parse_named_paths,
    read_rows,
    resolve_files,
    split_slice,
)
from miles.rollout.data.schema import Columns

ROWS = [{"input": f"question {i}", "label": i} for i in range(7)]
BOUND = st.none() | st.integers(-9, 9)


@pytest.fixture(scope="module", params=["jsonl", "parquet", "stream", "file", "folder", "glob", "saved"])
def place(request, tmp_path_factory) -> str:
    """The same seven rows, in every way they may lie on a disk."""
    folder = tmp_path_factory.mktemp("data")
    if request.param == "jsonl":
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    elif request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), folder / "data.parquet", row_group_size=2)
    elif request.param in ("stream", "file"):
        write_arrow(folder / "data.arrow", ROWS, stream=request.param == "stream", batch=3)
    elif request.param == "saved":
        write_parts(folder / "saved", ROWS, shards=3)
        return str(folder / "saved")
    else:
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS[:2])))
        pq.write_table(pa.Table.from_pylist(ROWS[2:4]), folder / "b.parquet")
        write_arrow(folder / "c.arrow", ROWS[4:])
        (folder / "notes.txt").write_text("no rows")
        (folder / ".hidden.jsonl").write_text("no rows")
        return str(folder) if request.param == "folder" else f"{folder}/[abc].*"
    return str(next(folder.iterdir()))


@settings(max_examples=examples(40), deadline=None)
@given(start=BOUND, stop=BOUND)
def test_a_slice_of_data_is_the_slice_of_its_rows(place, start, stop):
    path = f"{place}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    assert [(row.index, row.columns) for row in read_rows(path)] == list(enumerate(ROWS))[start:stop]


def test_a_path_without_a_slice_is_all_of_it(place):
    assert [row.columns for row in read_rows(place)] == ROWS
    assert count_rows(place) == len(ROWS)


def test_only_the_columns_of_a_prompt_are_kept(place):
    rows = list(read_rows(place, Columns(input="input")))
    assert [row.columns for row in rows] == [{"input": row["input"]} for row in ROWS]
    assert {row.found for row in rows} == {("input", "label")}


def test_every_row_says_where_it_lies(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "1"}\n\n{"input": "2"}\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "b.parquet", row_group_size=3)
    where = [row.where.removeprefix(f"{tmp_path}/") for row in read_rows(f"{tmp_path}@[1:6]")]
    assert where == ["a.jsonl, line 3", *(f"b.parquet, row {i}" for i in (1, 2, 3, 4))]


@pytest.mark.parametrize("inside", ["1", "", "a:b", "1:2:3", "1.5:2", ":,"])
def test_a_slice_that_is_not_two_bounds_is_refused(inside):
    with pytest.raises(UsageError, match="two row numbers"):
        split_slice(f"data.jsonl@[{inside}]")


def test_an_at_sign_alone_is_part_of_the_path():
    assert split_slice("a@b/data.jsonl") == ("a@b/data.jsonl", slice(None))


# -- words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "entry", "name"),
    [
        ("data.jsonl", DataEntry("data.jsonl", slice(None), None), "data"),
        ("a/data.jsonl*0.3", DataEntry("a/data.jsonl", slice(None), Fraction(3, 10)), "data"),
        ("data.jsonl@[:5]*2", DataEntry("data.jsonl", slice(None, 5), Fraction(2)), "data"),
        ("a/*.parquet*1e-2", DataEntry("a/*.parquet", slice(None), Fraction(1, 100)), "*"),
        ("a/*.parquet", DataEntry("a/*.parquet", slice(None), None), "*"),
        ("a/part*", DataEntry("a/part*", slice(None), None), "part*"),
        ("saved/train/", DataEntry("saved/train/", slice(None), None), "train"),
        (
            "reasoning_gym:leg_counting?size=3@[1:]*.5",
            DataEntry("reasoning_gym:leg_counting?size=3", slice(1, None), Fraction(1, 2)),
            "leg_counting",
        ),
    ],
)
def test_a_word_is_a_path_a_slice_and_a_weight(word, entry, name):
    assert parse_entry(word) == entry
    assert parse_entry(word).name == name


@pytest.mark.parametrize("weight", ["0", "-1", "0.0", "-0.3", "+0e5"])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(UsageError, match=r"The weight of data\.jsonl must be above 0, and is "):
        parse_entry(f"data.jsonl*{weight}")


def test_either_every_part_has_a_weight_or_none():
    assert [entry.weight for entry in parse_entries(["a.jsonl", "b.jsonl"])] == [None, None]
    with pytest.raises(UsageError, match=r"gives b\.jsonl no weight and others one"):
        parse_entries(["a.jsonl*0.5", "b.jsonl"])


def test_held_out_sets_come_as_pairs_with_their_own_names():
    assert parse_named_paths(("easy", "a.jsonl", "hard", "b.jsonl@[:5]")) == {"easy": "a.jsonl", "hard": "b.jsonl@[:5]"}
    assert parse_named_paths(()) == {}
    with pytest.raises(UsageError, match="pairs of a name and a file"):
        parse_named_paths(("easy", "a.jsonl", "b.jsonl"))
    with pytest.raises(UsageError, match="names the set easy twice"):
        parse_named_paths(("easy", "a.jsonl", "easy", "b.jsonl"))
    with pytest.raises(UsageError, match="has a weight"):
        parse_named_paths(("easy", "a.jsonl*0.5"))


# -- files ----------------------------------------------------------------------------------


def test_a_glob_takes_files_and_saved_folders_once_and_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"input": "x"}')
    write_parts(tmp_path / "saved", ROWS, shards=1)
    shard = tmp_path / "saved" / "data-00000-of-00001.arrow"
    everything = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "deep" / "c.jsonl", shard]
    assert list(resolve_files(f"{tmp_path}/**")) == everything
    assert list(resolve_files(f"{tmp_path}/*")) == [everything[0], everything[1], shard]
    assert list(resolve_files(f"{tmp_path}/**/*.jsonl")) == everything[:3]


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    (tmp_path / "a[1].jsonl").write_text('{"input": "x"}')
    assert resolve_files(f"{tmp_path}/a[1].jsonl") == (tmp_path / "a[1].jsonl",)


def test_what_is_no_data_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("a,b")
    (tmp_path / "near.jsonl").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, complaint in [
        ("absent.jsonl", r"absent\.jsonl does not exist; .* holds near\.jsonl\.$"),
        ("no/absent.jsonl", "nor does the folder"),
        ("data.csv", r"is not a \.jsonl, \.parquet or \.arrow file"),
        ("empty", r"empty holds no \.jsonl"),
        ("none*.jsonl", r"none\*\.jsonl matches nothing that is a"),
        ("*.csv", r"matches 1 names and none of them is a \.jsonl"),
    ]:
        with pytest.raises(DataError, match=complaint):
            resolve_files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"input": "a"}\n\n{"input": \n', r"data\.jsonl, line 3: this is not JSON"),
        (b'{"input": "a"}\n[1]\n', r"line 2: a row is a JSON object, and this is a list"),
        (b'{"input": "\xff"}\n', "line 1: this is not JSON"),
        (b'{"input": ' + b"[" * 100_000 + b"\n", "line 1: this is not JSON"),
        (b'{"input": "cut sho', "line 1: this is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, complaint):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        list(read_rows(str(path)))


def test_a_bad_line_that_is_let_through_keeps_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"input": "0"}\nno\n\n{"input": "2"}\n[]\n')
    (tmp_path / "b.jsonl").write_text('{"input": "4"}\n')
    expected: list[DataError] = []
    assert [row.index for row in read_rows(str(tmp_path), on_bad_row=expected.append)] == [0, 2, 4]
    assert [str(error).partition(":")[0] for error in expected] == [f"{tmp_path / 'a.jsonl'}, line {n}" for n in (2, 5)]


def test_unusual_line_separators_inside_text_do_not_end_a_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n", newline="")
    assert next(read_rows(str(path))).columns == {"input": "a\u2028b\x85c"}


def test_lines_outside_a_slice_are_not_even_parsed(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('no\n{"input": "1"}\nno\n')
    assert [row.index for row in read_rows(f"{tmp_path}/data.jsonl@[1:2]")] == [1]
    assert [row.index for row in read_rows(f"{tmp_path}/data.jsonl@[-2:-1]")] == [1]
