"""Prompt templates: a text around the question and a system message, for every prompt of a dataset."""

import json
from pathlib import Path

import pytest

from miles.core.errors import DataError
from miles.rollout.data.dataset import DatasetSource, read_dataset
from miles.rollout.data.prompt_template import PromptTemplate, apply_prompt_template


@pytest.fixture
def path(tmp_path: Path) -> str:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2+2?"},
    ]
    rows = [{"input": "1+1?"}, {"input": chat}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "d.jsonl")


def test_the_template_surrounds_the_last_user_message_and_keeps_other_braces(path: str):
    template = PromptTemplate(text="{prompt} Put the answer in \\boxed{}.")
    first, second = apply_prompt_template(read_dataset(path, input_key="input"), template).prompts
    assert first.messages[0]["content"] == "1+1? Put the answer in \\boxed{}."
    assert [message["content"] for message in second.messages[1:]] == [
        "Hi",
        "Hello",
        "2+2? Put the answer in \\boxed{}.",
    ]


def test_a_system_message_is_added_where_a_row_has_none(path: str):
    template = PromptTemplate(system="Think first.")
    first, second = apply_prompt_template(read_dataset(path, input_key="input"), template).prompts
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert first.messages[0]["content"] == "Think first."
    assert second.messages[0]["content"] == "Be brief."


def test_a_run_with_another_template_reads_other_data(path: str):
    dataset = read_dataset(path, input_key="input")
    other = apply_prompt_template(dataset, PromptTemplate(text="{prompt}!"))
    assert DatasetSource(dataset).state()["data"] != DatasetSource(other).state()["data"]


def test_a_message_of_parts_keeps_its_parts_in_the_template():
    parts = [{"type": "text", "text": "x"}]
    (message,) = PromptTemplate(text="A {prompt} B").apply(({"role": "user", "content": parts},), "row 0")
    assert [part["text"] for part in message["content"]] == ["A ", "x", " B"]


def test_a_prompt_without_text_is_named(tmp_path: Path):
    parts = [{"role": "system", "content": "x"}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"input": parts}) + "\n")
    dataset = read_dataset(str(tmp_path / "d.jsonl"), input_key="input")
    with pytest.raises(DataError, match="row 0: --prompt-template needs a user message with text"):
        apply_prompt_template(dataset, PromptTemplate(text="{prompt}!"))
