"""A teacher is looked at before a run starts: each thing that can be wrong is one sentence."""

import asyncio

import pytest
from tests.rollout.distill.scoring import scorer, table
from tests.rollout.reward.scripted_server import Fault, serving

from miles.core.errors import UsageError
from miles.rollout.distill.preflight import TeacherRequirements, check_teacher
from miles.rollout.distill.teacher_client import TeacherClient
from miles.rollout.distill.topk_set import TopKSet
from miles.rollout.reward.context import HTTPEndpoint

TEXT = "in the <|start|>"


def looked_at(tokenizer, answer, *, temperature=1.0, top=None, tokens=(1, 2, 3), **how):
    async def look():
        async with serving(answer) as served:
            teacher = TeacherClient(
                "math", HTTPEndpoint(url=served.url, retries=0, pause=0.001, **how), temperature=temperature
            )
            needs = TeacherRequirements(tokens=tokens, text=TEXT, vocab_size=31, positions=64, top=top)
            await check_teacher(teacher, tokenizer, needs)
            return served.asked

    return asyncio.run(look())


def beside(path, given, **how):
    """A teacher that has an answer of its own at a path."""
    answer = scorer(table(), **how)
    return lambda asked: given(asked) if asked.path == path else answer(asked)


@pytest.mark.parametrize("top", [None, TopKSet(k=2, strategy="union", vocab_size=31)])
def test_a_teacher_that_scores_is_taken(tokenizer, top):
    asked = looked_at(tokenizer, scorer(table()), top=top)
    assert [a.path for a in asked] == ["/model_info", "/v1/models", "/tokenize", "/generate"]
    body = asked[-1].body
    assert body["input_ids"] == [[1, 2, 3, 30]] and ("top_logprobs_num" in body) == (top is not None)


def test_a_prompt_of_one_token_is_enough(tokenizer):
    assert looked_at(tokenizer, scorer(table()), tokens=(7,))[-1].body["input_ids"] == [[7, 30]]


def test_a_teacher_that_reads_the_same_text_as_the_same_tokens_is_taken(tokenizer):
    looked_at(tokenizer, beside("/tokenize", lambda a: {"tokens": tokenizer.encode(a.body["prompt"])}))


@pytest.mark.parametrize("path", ["/tokenize", "/v1/models", "/model_info"])
@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_cannot_tell_of_itself_is_tried_all_the_same(tokenizer, path, status):
    answer = beside(path, lambda a: Fault(status=status))
    if (path, status) == ("/model_info", 500):
        with pytest.raises(UsageError, match=r"cannot be used: .*/model_info answered with status 500"):
            looked_at(tokenizer, answer)
    else:
        assert looked_at(tokenizer, answer)[-1].path == "/generate"


def test_a_server_that_must_draw_a_token_is_let_draw_one(tokenizer):
    answer = scorer(table())

    def strict(asked):
        if asked.path == "/generate" and asked.body["sampling_params"]["max_new_tokens"] < 1:
            return Fault(status=400, raw=b"max_new_tokens must be at least 1")
        return answer(asked)

    assert looked_at(tokenizer, strict)[-1].body["sampling_params"]["max_new_tokens"] == 1


def test_another_temperature_than_1_needs_a_teacher_that_heeds_it(tokenizer):
    looked_at(tokenizer, scorer(table()), temperature=0.7)
    with pytest.raises(
        UsageError, match=r"returns log-probs at temperature 1 whatever is requested.*0\.7; set that to 1"
    ):
        looked_at(tokenizer, scorer(table(), scales=False), temperature=0.7)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (scorer(table(), info={"vocab_size": 30}), "knows 30 tokens and the policy 31; it must know all of them"),
        (scorer(table(), info={"is_generation": False}), "returns no log-probs; serve another"),
        (
            beside("/v1/models", lambda a: {"data": [{"max_model_len": 8}]}),
            "reads 8 positions and the policy may write 64",
        ),
        (beside("/tokenize", lambda a: {"tokens": [1, 2]}), "has another tokenizer than --hf-checkpoint: .*'in'"),
        (lambda a: Fault(hang_up=True), "cannot be used: .*could not be reached.*fix --opd-teacher-urls"),
        (beside("/generate", lambda a: Fault(status=500)), "cannot be used: .*answered with status 500"),
        (beside("/generate", lambda a: [{}]), "cannot be used: the response has no meta_info"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_in_a_sentence(tokenizer, answer, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        looked_at(tokenizer, answer)
    assert str(caught.value).startswith("the teacher math at http://127.0.0.1") and "\n" not in str(caught.value)
