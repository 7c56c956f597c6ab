"""Demonstrations become trajectories whose last span is to be learned."""

import asyncio

import pytest
from tests.rollout.tiny import save_tokenizer

from miles.core.errors import DataError
from miles.core.types import Author, Prompt
from miles.models.tokenizer import load_tokenizer
from miles.rollout.offline.sft import SFTRollout

USER = {"role": "user", "content": "Where is the Colosseum?"}
ASSISTANT = {"role": "assistant", "content": "In Rome."}


def shown(tokenizer, *messages, chat: bool, label=None, template=None) -> tuple[str, str]:
    how = {"chat": chat, "template": template or {}, "loss_mask_type": "last"}
    supervised = SFTRollout(tokenizer, eos_token_ids=(tokenizer.eos_token_id,), **how)
    prompt = Prompt(id=4, messages=messages, label=label)
    (trajectory,) = asyncio.run(supervised.produce(prompt)).trajectories
    asked, taught = trajectory.branches[0]
    assert (asked.author, taught.author) == (Author.PROMPT, Author.POLICY)
    assert supervised.tokens(prompt).tolist() == [*asked.tokens, *taught.tokens]
    assert taught.tokens[-1] == tokenizer.eos_token_id
    return tokenizer.decode(asked.tokens.tolist()), tokenizer.decode(taught.tokens.tolist())


def test_text_is_followed_by_its_label_and_an_end(tokenizer):
    assert shown(tokenizer, {"role": "user", "content": "3+4="}, chat=False, label="7") == ("3+4=", "7<|end|>")


def test_a_label_that_brings_its_own_end_gets_no_second(tokenizer):
    assert shown(tokenizer, {"role": "user", "content": "3+4="}, chat=False, label="7<|end|>")[1] == "7<|end|>"


def test_the_assistants_last_message_is_the_demonstration(tokenizer):
    asked, taught = shown(tokenizer, USER, ASSISTANT, USER, ASSISTANT, chat=True)
    assert asked.endswith("In Rome.<|end|>\n<|start|>user\nWhere is the Colosseum?<|end|>\n<|start|>assistant\n")
    assert taught == "In Rome.<|end|>"


def test_a_label_stands_in_for_the_assistants_message(tokenizer):
    assert shown(tokenizer, USER, chat=True, label="In Rome.") == shown(tokenizer, USER, ASSISTANT, chat=True)


def test_a_demonstration_earns_nothing(tokenizer):
    supervised = SFTRollout(tokenizer, eos_token_ids=(tokenizer.eos_token_id,), chat=True)
    assert asyncio.run(supervised.produce(Prompt(id=1, messages=(USER, ASSISTANT)))).rewards == [0.0]


def test_an_end_is_added_where_the_template_writes_none(tmp_path):
    opening = "{% if add_generation_prompt %}assistant:{% endif %}"
    bare = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + opening
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=bare))
    assert shown(tokenizer, USER, ASSISTANT, chat=True)[1] == "In Rome.;<|end|>"


@pytest.mark.parametrize(
    ("messages", "chat", "complaint"),
    [
        ((USER,), False, "Prompt 4 has no demonstration; .*--label-key"),
        ((USER,), True, "Prompt 4 has no demonstration; .*assistant"),
        ((ASSISTANT,), True, "Prompt 4 has a demonstration but no question"),
    ],
)
def test_a_row_without_question_or_demonstration_is_refused(tokenizer, messages, chat, complaint):
    with pytest.raises(DataError, match=complaint):
        shown(tokenizer, *messages, chat=chat)


def test_a_conversation_as_text_is_refused(tokenizer):
    with pytest.raises(DataError, match="Prompt 4 is a conversation"):
        shown(tokenizer, USER, ASSISTANT, chat=False, label="x")


def test_a_template_that_rewrites_what_went_before_is_refused(tokenizer):
    with pytest.raises(DataError, match="does not render prompt 4 as its question followed by its demonstration"):
        shown(tokenizer, USER, ASSISTANT, chat=True, template={"think": False})
