"""Rows of a prompt and two replies become pairs, rendered as demonstrations are; bad rows are named by their place."""

import asyncio
import json
from dataclasses import replace

import pytest

from miles.core.errors import DataError
from miles.core.types import Author, Prompt
from miles.rollout.data.dataset import read_dataset
from miles.rollout.data.mixture import read_parts
from miles.rollout.data.schema import PreferenceColumns
from miles.rollout.offline.preference import PREFERENCE, PreferenceRollout
from miles.rollout.offline.sft import SFTRollout

USER = {"role": "user", "content": "Where is the Colosseum?"}
ROME = {"role": "assistant", "content": "In Rome."}
PARIS = {"role": "assistant", "content": "In Paris."}
PAIR = {"chosen": ROME, "rejected": PARIS}


def write(folder, *rows):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder, *rows, **more):
    return read_dataset(write(folder, *rows), input_key="input", pair=PreferenceColumns(), **more).prompts


def preferred(tokenizer, *, chat=True):
    shown = SFTRollout(tokenizer, eos_token_ids=(tokenizer.eos_token_id,), chat=chat, loss_mask_type="last")
    return PreferenceRollout(shown, chat=chat)


@pytest.mark.parametrize(
    "row",
    [
        {"input": USER["content"], "chosen": "In Rome.", "rejected": "In Paris."},
        {"input": [USER], "chosen": [ROME], "rejected": [PARIS]},
        {"input": [USER], "chosen": [USER, ROME], "rejected": [USER, PARIS]},
        {"input": [USER], "chosen": "In Rome.", "rejected": [USER, PARIS], "metadata": {"level": 1}},
    ],
    ids=["text", "replies", "conversations", "mixed"],
)
def test_replies_are_text_messages_or_conversations(tmp_path, row):
    (prompt,) = read(tmp_path, row)
    assert list(prompt.messages) == [USER]
    assert prompt.metadata == {**row.get("metadata", {}), PREFERENCE: PAIR}


def test_the_columns_go_by_other_names_and_through_parts(tmp_path):
    path = write(tmp_path, {"input": "a", "good": "b", "bad": "c"})
    (part,) = read_parts([path], input_key="input", pair=PreferenceColumns(chosen="good", rejected="bad"))
    assert part.dataset.prompts[0].metadata[PREFERENCE]["rejected"]["content"] == "c"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"input": "a", "rejected": "c"}, r"pairs.jsonl.*line 2: there is no column chosen .*--chosen-key"),
        ({"input": "a", "chosen": "c"}, r"line 2: there is no column rejected .*--rejected-key"),
        ({"input": "a", "chosen": "c", "rejected": "c"}, "line 2: chosen and rejected are the same"),
        ({"input": "a", "chosen": 3, "rejected": "c"}, "line 2: chosen must be text or a list of messages, and is 3"),
        ({"input": "a", "chosen": "b", "rejected": "c", "metadata": {"preference": 1}}, "line 2: metadata has its own"),
        ({"input": "a", "chosen": None, "rejected": "c"}, "line 2: chosen must be text"),
        ({"input": "a", "chosen": "b", "rejected": [USER]}, "line 2: rejected must be text, one assistant message"),
        (
            {"input": "a", "chosen": [ROME, USER, ROME], "rejected": "c"},
            "line 2: chosen must be text, one assistant message",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_told_with_its_file_and_line(tmp_path, row, complaint):
    good = {"input": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=complaint):
        read(tmp_path, good, row)
    assert len(read(tmp_path, good, row, skip_bad_rows=True)) == 1


def test_generated_questions_have_no_pairs():
    with pytest.raises(DataError, match="has questions, not pairs"):
        read_dataset("reasoning_gym:leg_counting?size=2", input_key="input", pair=PreferenceColumns())


@pytest.mark.parametrize("chat", [True, False])
def test_each_reply_is_rendered_as_a_demonstration_is(tokenizer, chat):
    prompt = Prompt(id=4, messages=(USER,), metadata={PREFERENCE: PAIR})
    rollout = preferred(tokenizer, chat=chat)
    group = asyncio.run(rollout.produce(prompt))
    shown = SFTRollout(tokenizer, eos_token_ids=(tokenizer.eos_token_id,), chat=chat)
    for index, (trajectory, text) in enumerate(zip(group.trajectories, ("In Rome.", "In Paris."), strict=True)):
        expected = asyncio.run(shown.produce(replace(prompt, label=text))).trajectories[0]
        asked, reply = trajectory.branches[0]
        assert (asked.author, reply.author, trajectory.index) == (Author.PROMPT, Author.POLICY, index)
        assert [s.tokens.tolist() for s in trajectory.spans] == [s.tokens.tolist() for s in expected.spans]
    assert group.rewards == [1.0, 0.0]
    assert len(rollout.tokens(prompt)) == max(sum(map(len, t.spans)) for t in group.trajectories)


def test_a_question_that_ends_with_the_assistant_is_still_a_question(tokenizer):
    prompt = Prompt(id=4, messages=(USER, ROME, USER), metadata={PREFERENCE: PAIR})
    (asked, reply), _ = preferred(tokenizer).branches(prompt)
    assert tokenizer.decode(reply.tokens.tolist()) == "In Rome.<|end|>"
    assert tokenizer.decode(asked.tokens.tolist()).endswith("assistant\n")


def test_replies_that_differ_only_in_their_text_are_refused(tokenizer):
    ended = {"role": "assistant", "content": "In Rome.<|end|>"}
    prompt = Prompt(id=4, messages=(USER,), metadata={PREFERENCE: {"chosen": ROME, "rejected": ended}})
    with pytest.raises(DataError, match="two replies to prompt 4 have the same tokens"):
        asyncio.run(preferred(tokenizer, chat=False).produce(prompt))


def test_a_reply_that_is_not_text_needs_a_template(tokenizer):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    prompt = Prompt(id=4, messages=(USER,), metadata={PREFERENCE: {"chosen": calls, "rejected": PARIS}})
    with pytest.raises(DataError, match="chosen reply to prompt 4 is not text; add --apply-chat-template"):
        asyncio.run(preferred(tokenizer, chat=False).produce(prompt))
