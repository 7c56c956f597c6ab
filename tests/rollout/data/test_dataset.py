"""Data sets and the cursor over them: a run resumed anywhere reads what an unbroken one would have read."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.core.errors import DataError, ResumeError
from miles.core.types import Prompt
from miles.rollout.data.dataset import Dataset, DatasetSource, PromptCheck, check_prompts, read_dataset


def dataset(n: int) -> Dataset:
    prompts = tuple(Prompt(id=i, messages=({"role": "user", "content": "x" * (i + 1)},)) for i in range(n))
    return Dataset(path="made.jsonl", prompts=prompts)


def write(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def drawn(source: DatasetSource, n: int) -> list[tuple[int, int]]:
    return [(p.id, p.epoch) for p in (source.next() for _ in range(n))]


@given(
    size=st.integers(1, 9),
    before=st.integers(0, 30),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_a_source_resumed_at_any_point_equals_one_never_stopped(size, before, shuffle, seed):
    data = dataset(size)
    unbroken = DatasetSource(data, shuffle=shuffle, seed=seed)
    drawn(unbroken, before)
    state = json.loads(json.dumps(unbroken.state()))
    resumed = DatasetSource(data, shuffle=shuffle, seed=seed)
    resumed.load(state)
    assert resumed.state() == state
    assert drawn(resumed, 3 * size) == drawn(unbroken, 3 * size)


@given(size=st.integers(1, 40), epochs=st.integers(1, 4), seed=st.integers(0, 100), shuffle=st.booleans())
def test_every_epoch_gives_every_prompt_once(size, epochs, seed, shuffle):
    source = DatasetSource(dataset(size), shuffle=shuffle, seed=seed)
    for epoch in range(epochs):
        order = drawn(source, size)
        assert sorted(order) == [(i, epoch) for i in range(size)]
        assert shuffle or order == sorted(order)


def test_orders_differ_between_epochs_and_between_seeds():
    one, other = DatasetSource(dataset(50), shuffle=True, seed=1), DatasetSource(dataset(50), shuffle=True, seed=2)
    first, second = [i for i, _ in drawn(one, 50)], [i for i, _ in drawn(one, 50)]
    assert first != second
    assert first != [i for i, _ in drawn(other, 50)]
    assert first != sorted(first)


def test_dropping_a_prompt_moves_no_other():
    whole = dataset(30)
    part = replace(whole, prompts=whole.prompts[:10] + whole.prompts[20:])
    order = [i for i, _ in drawn(DatasetSource(whole, shuffle=True, seed=3), 30)]
    assert [i for i in order if not 10 <= i < 20] == [
        i for i, _ in drawn(DatasetSource(part, shuffle=True, seed=3), 20)
    ]


def test_a_prompt_can_be_found_again_by_id_and_epoch():
    source = DatasetSource(dataset(5), shuffle=True, seed=9)
    for prompt in [source.next() for _ in range(12)]:
        assert source.get_prompt(prompt.id, prompt.epoch) == prompt
    with pytest.raises(ResumeError, match="no prompt 5"):
        source.get_prompt(5, 0)


@pytest.mark.parametrize("other", [{"n": 6}, {"seed": 8}, {"shuffle": False}])
def test_a_cursor_over_other_data_is_refused(other):
    state = DatasetSource(dataset(5), shuffle=True, seed=7).state()
    changed = {"n": 5, "seed": 7, "shuffle": True} | other
    with pytest.raises(ResumeError, match="restore the file"):
        DatasetSource(dataset(changed.pop("n")), **changed).load(state)


def test_the_seed_does_not_matter_to_a_source_that_does_not_shuffle():
    DatasetSource(dataset(5), seed=1).load(DatasetSource(dataset(5), seed=2).state())


def test_rows_become_prompts(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path,
        {"q": "1+1?", "a": 2, "metadata": {"level": 1}},
        {"q": chat, "a": "text"},
        {"q": "x", "a": 0.5, "metadata": None},
        {"q": "y", "a": None},
        {"q": "z", "a": ["p", 1]},
    )
    prompts = read_dataset(path, input_key="q", label_key="a").prompts
    assert [p.id for p in prompts] == [0, 1, 2, 3, 4]
    assert [p.label for p in prompts] == ["2", "text", "0.5", None, '["p", 1]']
    assert list(prompts[0].messages) == [{"role": "user", "content": "1+1?"}]
    assert list(prompts[1].messages) == chat
    assert [dict(p.metadata) for p in prompts] == [{"level": 1}, {}, {}, {}, {}]


def test_ids_are_rows_of_the_file_also_in_a_slice(tmp_path):
    path = write(tmp_path, *({"input": str(i)} for i in range(5)))
    assert [p.id for p in read_dataset(f"{path}@[-2:]", input_key="input").prompts] == [3, 4]


def test_parquet_messages_lose_the_fields_they_do_not_have(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "7", "name": "calculator"}]
    pq.write_table(pa.Table.from_pylist([{"input": chat, "label": 3}]), tmp_path / "data.parquet")
    (prompt,) = read_dataset(str(tmp_path / "data.parquet"), input_key="input", label_key="label").prompts
    assert list(prompt.messages) == chat
    assert prompt.label == "3"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "a", "id": 1}, r"line 1: there is no column input \(found: prompt, id\); .*--input-key"),
        ({"input": "a"}, r"no column label \(found: input\); .*--label-key"),
        ({"input": 5, "label": 1}, "input must be text or a list of messages, and is 5"),
        ({"input": [], "label": 1}, "input must be text or a list of messages"),
        ({"input": ["hi"], "label": 1}, "each message of input needs a role and a content"),
        ({"input": [{"content": "hi"}], "label": 1}, "needs a role and a content"),
        ({"input": [{"role": "user"}], "label": 1}, "needs a role and a content"),
        ({"input": [{"role": "user", "content": 7}], "label": 1}, "needs a role and a content"),
        ({"input": "a", "label": 1, "metadata": "m"}, "metadata must be an object, and is a str"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path, row, complaint):
    with pytest.raises(DataError, match=complaint):
        read_dataset(write(tmp_path, row), input_key="input", label_key="label")


def test_a_message_that_calls_tools_needs_no_content(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    path = write(tmp_path, {"input": [{"role": "user", "content": "go"}, calls]})
    assert read_dataset(path, input_key="input").prompts[0].messages[1] == calls


NO_CHECK = PromptCheck(context=None, max_rows=0, skip_bad=False)


def content(prompt):
    return prompt.messages[0]["content"]


def content_unless_third(prompt):
    if prompt.id == 2:
        raise DataError("Prompt 2 renders to no token at all.")
    return content(prompt)


def test_a_prompt_that_cannot_be_rendered_is_found_before_training():
    check = PromptCheck(context=None, max_rows=5, skip_bad=False)
    with pytest.raises(DataError) as raised:
        check_prompts(dataset(5), content_unless_third, limit=None, check=check)
    assert str(raised.value) == (
        "made.jsonl: Prompt 2 renders to no token at all; go on without such prompts with --skip-bad-rows."
    )


def test_a_prompt_that_fills_the_context_is_found_before_training():
    check = PromptCheck(context=4, max_rows=5, skip_bad=False)
    with pytest.raises(DataError, match="prompt 3 has 4 tokens, which leaves no room for a reply in a context of 4"):
        check_prompts(dataset(5), content, limit=None, check=check)


def test_only_the_first_rows_are_rendered_and_the_note_says_how_many():
    check = PromptCheck(context=None, max_rows=2, skip_bad=False)
    checked = check_prompts(dataset(5), content_unless_third, limit=None, check=check)
    assert checked.prompts == dataset(5).prompts
    assert checked.note == "2 of 5 prompts of made.jsonl were rendered to check."


def test_skipped_prompts_keep_their_place_and_are_counted():
    check = PromptCheck(context=4, max_rows=1, skip_bad=True)
    checked = check_prompts(dataset(5), content_unless_third, limit=None, check=check)
    assert checked.prompts == dataset(5).prompts
    assert checked.bad_ids == {2, 3, 4}
    assert "3 of 5 prompts of made.jsonl cannot be used and are dropped in their turn" in checked.note
    assert DatasetSource(checked).state() == DatasetSource(dataset(5)).state()


def test_skipping_every_prompt_is_an_error():
    check = PromptCheck(context=1, max_rows=1, skip_bad=True)
    with pytest.raises(DataError, match=r"None of the 3 prompts of made\.jsonl can be used; the first: prompt 0 has"):
        check_prompts(dataset(3), content, limit=None, check=check)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "a"}\r\n{"input": "b"}\r\n')
    assert [content(p) for p in read_dataset(str(path), input_key="input").prompts] == ["a", "b"]
    assert [content(p) for p in read_dataset(f"{path}@[-2:-1]", input_key="input").prompts] == ["a"]


@pytest.mark.parametrize("column", ["input", "label", "metadata"])
def test_a_single_surrogate_is_a_bad_row(tmp_path, column):
    good = {"input": "a", "label": "b", "metadata": {"key": "c \U0001f600"}}
    bad = {**good, column: {"key": "\ud800"} if column == "metadata" else "\ud800"}
    path = write(tmp_path, good, bad)
    with pytest.raises(DataError, match=r"line 2: a text has half of a surrogate pair"):
        read_dataset(path, input_key="input", label_key="label")
    assert read_dataset(path, input_key="input", label_key="label", skip_bad_rows=True).skipped == 1


def test_long_prompts_are_dropped_counted_and_reported():
    fitted = check_prompts(dataset(10), content, limit=4, check=NO_CHECK)
    assert [p.id for p in fitted.prompts] == [0, 1, 2, 3]
    assert fitted.dropped == 6
    assert fitted.note == "6 of 10 prompts of made.jsonl are longer than 4 tokens and were dropped."


def test_without_a_limit_nothing_is_rendered_or_dropped():
    whole = dataset(3)
    assert check_prompts(whole, lambda p: pytest.fail("rendered"), limit=None, check=NO_CHECK) is whole
    assert whole.note is None


def test_a_limit_that_drops_every_prompt_is_an_error():
    with pytest.raises(DataError, match=r"All 3 prompts of made\.jsonl are longer than 0 tokens"):
        check_prompts(dataset(3), content, limit=0, check=NO_CHECK)


# -- rows that are no good ------------------------------------------------------------------

BAD = st.sampled_from(["no JSON", "[1]", '{"input": 5}', '{"question": "x"}', '{"input": [{"role": "user"}]}'])
GOOD = st.builds(lambda text: json.dumps({"input": text}), st.text(min_size=1, max_size=8))


@settings(deadline=None)
@given(lines=st.lists(st.one_of(BAD, GOOD, st.just("")), min_size=1, max_size=20))
def test_skipping_bad_rows_keeps_the_order_and_the_ids_of_the_others(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    path.write_text("\n".join(lines))
    written = [line for line in lines if line]
    texts = [loaded["input"] if isinstance(loaded := _loaded(line), dict) else None for line in written]
    expected = [(i, text) for i, text in enumerate(texts) if isinstance(text, str)]
    if not expected:
        with pytest.raises(DataError, match=r"holds no rows|None of the \d+ rows"):
            read_dataset(str(path), input_key="input", skip_bad_rows=True)
        return
    data = read_dataset(str(path), input_key="input", skip_bad_rows=True)
    assert [(p.id, p.messages[0]["content"]) for p in data.prompts] == expected
    assert data.skipped == len(written) - len(expected)


def _loaded(line):
    try:
        return {"input": None} | dict(json.loads(line))
    except (ValueError, TypeError):
        return None


def test_skipped_rows_are_counted_and_the_first_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"input": "a"}\noh\n{"input": "b"}\n{"input": 7}\n')
    with pytest.raises(DataError, match=r"data\.jsonl, line 2: this is not JSON"):
        read_dataset(str(path), input_key="input")
    data = read_dataset(str(path), input_key="input", skip_bad_rows=True)
    assert data.note is not None
    assert data.note.startswith(
        f"2 of 4 rows of {path} cannot be read and were skipped; the first: {path}, line 2: this"
    )
    shorter = check_prompts(data, content, limit=1, check=NO_CHECK)
    assert shorter.note == data.note
    assert len(replace(shorter, dropped=1, limit=3).note.split(". ")) >= 2


def test_all_rows_bad_is_an_error_that_says_what_was_wrong(tmp_path):
    path = write(tmp_path, {"question": "a"}, {"question": "b"})
    with pytest.raises(DataError, match=r"None of the 2 rows of .* can be read; the first: .*line 1: .*--input-key"):
        read_dataset(path, input_key="input", skip_bad_rows=True)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_a_file_without_rows_is_told(tmp_path, content):
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(DataError, match="holds no rows"):
        read_dataset(str(tmp_path / "data.jsonl"), input_key="input")


def test_a_slice_without_rows_is_told(tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl@\[5:\] holds no rows"):
        read_dataset(f"{write(tmp_path, {'input': 'a'})}@[5:]", input_key="input")


def test_metadata_that_json_has_no_words_for_has_one_fingerprint_in_every_process():
    odd = {"pairs": {(1, 2): {"b", "a"}}, 3: (4, {5}), "mixed": {1: "x", "2": "y"}}
    prompt = Prompt(id=0, messages=({"role": "user", "content": "x"},), metadata=odd)
    state = DatasetSource(Dataset(path="made", prompts=(prompt,))).state()
    assert state["data"] == "4c564215aa46ac24"
