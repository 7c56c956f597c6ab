"""Which tokens of a conversation are learned: transformers is the judge where a template marks them, else by hand."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.templates import (
    CHATML,
    LLAMA3,
    MARKED,
    MARKED_LINES,
    MARKED_THINKING,
    QWEN3,
    SYSTEM,
    tokenizer_with,
)
from tests.tiers import examples
from transformers import AutoTokenizer

from miles.algo.advantages import SFTEstimator as Credit
from miles.core.errors import DataError
from miles.core.types import DEMONSTRATION, Author, Prompt
from miles.rollout.offline.sft import SFTRollout

TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the Colosseum?"},
    {"role": "assistant", "content": "In Rome."},
    {"role": "user", "content": "And the Louvre?"},
    {"role": "assistant", "content": "In Paris."},
)
AGENT = (
    {"role": "user", "content": "Time?"},
    {"role": "assistant", "content": "call(clock)"},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Noon."},
)
THOUGHT = tuple(
    m | {"content": f"<think>\nhm\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m for m in TALK
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    known = {}

    def of(template, eos="<|im_end|>"):
        if template not in known:
            known[template] = tokenizer_with(tmp_path_factory.mktemp("tokenizer"), template, eos)
        return known[template]

    return of


def supervised(tokenizer, loss_mask_type="all", **more):
    return SFTRollout(
        tokenizer, eos_token_ids=(tokenizer.eos_token_id,), chat=True, loss_mask_type=loss_mask_type, **more
    )


def branches(tokenizer, messages, loss_mask_type="all", label=None, **more):
    """Each branch as (author, text) pairs."""
    group = asyncio.run(
        supervised(tokenizer, loss_mask_type, **more).produce(Prompt(id=4, messages=messages, label=label))
    )
    (trajectory,) = group.trajectories
    return [
        [(span.author, tokenizer.decode(span.tokens.tolist())) for span in branch] for branch in trajectory.branches
    ]


def learned(tokenizer, messages, how="all", **more):
    """The texts that are learned, branch by branch."""
    found = branches(tokenizer, messages, how, **more)
    return [[text for author, text in branch if author is Author.POLICY] for branch in found]


def weighed(at, **fields):
    return tuple(m | fields if i in at else m for i, m in enumerate(TALK))


# -- templates that only append ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "eos", "messages", "expected"),
    [
        (CHATML, "<|im_end|>", TALK, ["In Rome.<|im_end|>", "In Paris.<|im_end|>"]),
        (CHATML, "<|im_end|>", AGENT, ["call(clock)<|im_end|>", "Noon.<|im_end|>"]),
        (SYSTEM, "<|im_end|>", TALK[1:], ["In Rome.<|im_end|>", "In Paris.<|im_end|>"]),
        (LLAMA3, "<|eot_id|>", TALK, ["In Rome.<|eot_id|>", "In Paris.<|eot_id|>"]),
        (LLAMA3, "<|eot_id|>", AGENT, ["call(clock)<|eot_id|>", "Noon.<|eot_id|>"]),
    ],
    ids=["chatml", "chatml tools", "smollm2", "llama3", "llama3 tools"],
)
def test_every_turn_of_the_assistants_is_learned_up_to_its_end(made, template, eos, messages, expected):
    tokenizer = made(template, eos)
    assert learned(tokenizer, messages) == [expected]


def test_the_whole_conversation_is_there_and_nothing_but_the_turns_is_the_policys(made):
    ((first, *rest),) = branches(made(CHATML), TALK)
    assert first == (
        Author.PROMPT,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is the Colosseum?<|im_end|>\n"
        "<|im_start|>assistant\n",
    )
    assert rest == [
        (Author.POLICY, "In Rome.<|im_end|>"),
        (Author.ENV, "\n<|im_start|>user\nAnd the Louvre?<|im_end|>\n<|im_start|>assistant\n"),
        (Author.POLICY, "In Paris.<|im_end|>"),
    ]


def test_the_loss_mask_is_the_author_and_the_tokens_are_those_of_one_rendering(made):
    tokenizer = made(CHATML)
    (trajectory,) = asyncio.run(supervised(tokenizer).produce(Prompt(id=4, messages=TALK))).trajectories
    (row,) = Credit()(asyncio.run(supervised(tokenizer).produce(Prompt(id=4, messages=TALK))))
    assert row.mask.tolist() == np.concatenate([span.mask for span in trajectory.spans]).tolist()
    whole = tokenizer.apply_chat_template(TALK, add_generation_prompt=False)
    assert row.tokens.tolist() == whole[: len(row)] and tokenizer.decode(whole[len(row) :]) == "\n"
    assert set(row.advantages[row.mask]) == {1.0} and row.oldest_version is None
    assert all(span.version == DEMONSTRATION for span in trajectory.spans if span.author is Author.POLICY)


def test_one_turn_or_a_label_is_learned_as_ever(made):
    tokenizer = made(CHATML)
    for how in ("all", "last", "each"):
        assert learned(tokenizer, TALK[:3], how) == [["In Rome.<|im_end|>"]]
        assert learned(tokenizer, TALK[:2], how, label="In Rome.") == [["In Rome.<|im_end|>"]]


def test_what_follows_the_last_turn_is_dropped(made):
    tokenizer = made(CHATML)
    assert branches(tokenizer, TALK[:4]) == branches(tokenizer, TALK[:3])
    with pytest.raises(DataError, match="Prompt 4 has no demonstration; end its messages"):
        branches(tokenizer, TALK[:4], "last")


def test_the_last_message_alone_or_each_in_a_row_of_its_own(made):
    tokenizer = made(CHATML)
    assert learned(tokenizer, TALK, "last") == [["In Paris.<|im_end|>"]]
    rows = branches(tokenizer, TALK, "each")
    assert [row[-1] for row in rows] == [(Author.POLICY, "In Rome.<|im_end|>"), (Author.POLICY, "In Paris.<|im_end|>")]
    assert rows[0] == branches(tokenizer, TALK[:3])[0] and rows[1] == branches(tokenizer, TALK, "last")[0]


def test_a_greeting_that_nobody_asked_for_is_context(made):
    greeted = ({"role": "assistant", "content": "Hello!"}, *TALK[1:])
    for template in (CHATML, MARKED):
        assert learned(made(template), greeted) == [["In Rome.<|im_end|>", "In Paris.<|im_end|>"]]


def test_an_end_is_added_only_to_a_conversation_that_ends_with_the_assistant(tmp_path):
    opening = "{% if add_generation_prompt %}assistant:{% endif %}"
    bare = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + opening
    tokenizer = tokenizer_with(tmp_path, bare)
    assert learned(tokenizer, TALK) == [["In Rome.;", "In Paris.;<|im_end|>"]]
    assert learned(tokenizer, TALK[:4]) == [["In Rome.;"]]


# -- fields that take a turn out --------------------------------------------------------------


@pytest.mark.parametrize("field", [{"weight": 0}, {"loss": False}, {"step_loss_mask": 0}, {"weight": 0, "loss": True}])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendered", "marked"])
def test_a_turn_of_weight_0_is_context(made, template, field):
    tokenizer = made(template)
    assert learned(tokenizer, weighed({2}, **field)) == [["In Paris.<|im_end|>"]]
    assert learned(tokenizer, weighed({4}, **field)) == [["In Rome.<|im_end|>"]]
    assert learned(tokenizer, weighed({2}, **field), "each") == [["In Paris.<|im_end|>"]]
    assert learned(tokenizer, weighed({2, 4}, weight=1)) == learned(tokenizer, TALK)


def test_a_template_never_sees_the_fields(tmp_path):
    telling = CHATML.replace("{{ m.role }}", "{{ m.role + '!' if m.weight is defined else m.role }}")
    assert "!" not in str(branches(tokenizer_with(tmp_path, telling), weighed({2}, weight=0)))


@pytest.mark.parametrize(
    ("messages", "how", "complaint"),
    [
        (weighed({2, 4}, weight=0), "all", "Prompt 4 has nothing to train on"),
        (weighed({4}, weight=0), "last", "Prompt 4 has nothing to train on"),
        (weighed({2}, weight=0.5), "all", "a message's weight is 0.5, and must be 0 or 1"),
        (weighed({2}, loss="no"), "all", "a message's loss is 'no', and must be 0 or 1"),
        (weighed({1}, weight=1), "all", "a message of user has weight 1, and only assistant messages are trained"),
    ],
)
def test_fields_that_make_no_sense_are_refused_in_a_sentence(made, messages, how, complaint):
    with pytest.raises(DataError, match=complaint):
        branches(made(CHATML), messages, how)


def test_a_users_message_may_say_that_it_has_no_weight(made):
    assert learned(made(CHATML), weighed({1, 3}, weight=0)) == learned(made(CHATML), TALK)


# -- templates that rewrite -------------------------------------------------------------------


def test_a_template_that_leaves_out_earlier_thoughts_is_refused_unless_each_turn_has_its_row(made):
    tokenizer = made(QWEN3)
    with pytest.raises(
        DataError, match=r"where the turns of prompt 4 begin and end: it rewrites earlier turns .*--loss-mask-type each"
    ):
        branches(tokenizer, THOUGHT)
    assert learned(tokenizer, THOUGHT, "each") == [
        ["<think>\nhm\n</think>\n\nIn Rome.<|im_end|>"],
        ["<think>\nhm\n</think>\n\nIn Paris.<|im_end|>"],
    ]
    second = branches(tokenizer, THOUGHT, "each")[1][0][1]
    assert "hm" not in second and "In Rome." in second  # as the policy will see it
    assert learned(tokenizer, THOUGHT, "last") == [["<think>\nhm\n</think>\n\nIn Paris.<|im_end|>"]]


def test_a_template_that_rewrites_can_learn_the_calls_and_answers_after_one_question(made):
    tokenizer = made(QWEN3)
    agent = tuple(
        m | {"content": f"<think>\nhm\n</think>\n\n{m['content']}"} if m["role"] == "assistant" else m for m in AGENT
    )
    assert learned(tokenizer, agent) == [
        ["<think>\nhm\n</think>\n\ncall(clock)<|im_end|>", "<think>\nhm\n</think>\n\nNoon.<|im_end|>"]
    ]


def test_a_question_that_is_not_the_beginning_of_its_demonstration_is_refused_as_ever(tmp_path):
    opening = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n(brief) {% endif")
    tokenizer = tokenizer_with(tmp_path, opening)
    for how in ("all", "last", "each"):
        with pytest.raises(DataError, match="does not render prompt 4 as its question followed by its demonstration"):
            branches(tokenizer, TALK[:3], how)


def test_a_turn_that_begins_within_a_token_is_refused(made):
    glued = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "-y"}, *TALK[3:])
    with pytest.raises(DataError, match="a turn begins or ends within a token"):
        branches(made(CHATML), glued)


# -- templates that mark ----------------------------------------------------------------------

texts = st.text(alphabet="the in\n-Rome.", min_size=1, max_size=12)
roles = st.sampled_from(["user", "assistant", "tool"])


@settings(max_examples=examples(60), deadline=None)
@given(
    said=st.lists(st.tuples(roles, texts), min_size=1, max_size=7),
    template=st.sampled_from([MARKED, MARKED_THINKING, MARKED_LINES]),
)
def test_marked_tokens_are_those_that_transformers_marks(made, said, template):
    tokenizer = made(template)
    messages = ({"role": "user", "content": "Hi"}, *({"role": role, "content": text} for role, text in said))
    if all(role != "assistant" for role, _ in said):
        return
    oracle = AutoTokenizer.from_pretrained(tokenizer._folder)
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = oracle.apply_chat_template([dict(m) for m in messages], **how)
    (row,) = Credit()(asyncio.run(supervised(tokenizer).produce(Prompt(id=4, messages=messages))))
    assert row.tokens.tolist() == expected["input_ids"][: len(row)]
    assert row.mask.tolist() == [bool(mark) for mark in expected["assistant_masks"][: len(row)]]
    assert not any(expected["assistant_masks"][len(row) :])


@settings(max_examples=examples(60), deadline=None)
@given(
    said=st.lists(st.tuples(roles, st.text(alphabet="the in\nRome.", min_size=1, max_size=12)), min_size=1, max_size=7)
)
def test_rendering_finds_what_marks_say(made, said):
    messages = ({"role": "user", "content": "Hi"}, *({"role": r, "content": t.strip() or "x"} for r, t in said))
    if all(role != "assistant" for role, _ in said):
        return
    assert branches(made(CHATML), messages) == branches(made(MARKED), messages)


def test_marks_help_where_a_template_rewrites(made):
    assert learned(made(MARKED_THINKING), THOUGHT) == [
        ["In Rome.<|im_end|>", "<think>\nhm\n</think>\n\nIn Paris.<|im_end|>"]
    ]


def test_marks_help_where_the_question_is_not_the_beginning(tmp_path):
    opening = MARKED.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n(brief) {% endif")
    tokenizer = tokenizer_with(tmp_path, opening)
    assert learned(tokenizer, TALK, "last") == [["In Paris.<|im_end|>"]]
    assert learned(tokenizer, TALK, "each") == [["In Rome.<|im_end|>"], ["In Paris.<|im_end|>"]]


def test_passages_that_cannot_be_told_to_be_of_one_message_are_refused_when_some_are_taken_out(made):
    lines = tuple(m | {"content": "a|b"} if m["role"] == "assistant" else m for m in weighed({2}, weight=0))
    with pytest.raises(DataError, match="it marks 4 passages in 2 messages of the assistant's, not all to be learned"):
        branches(made(MARKED_LINES), lines)


def test_the_longest_row_is_measured(made):
    tokenizer = made(QWEN3)
    tokens = supervised(tokenizer, "each").tokens(Prompt(id=4, messages=THOUGHT))
    assert tokens.tolist() == supervised(tokenizer, "last").tokens(Prompt(id=4, messages=THOUGHT)).tolist()
