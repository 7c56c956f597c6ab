"""Rendering prompts to tokens, and single-turn trajectories."""

import asyncio

import numpy as np
import pytest
from tests.rollout.tiny import Echo

from miles.core.errors import DataError
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.prompt_renderer import PromptRenderer

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the Colosseum?"})


def asking(*messages, **kw) -> Prompt:
    return Prompt(id=5, messages=messages, **kw)


def test_plain_text_is_encoded_as_it_is(tokenizer):
    tokens = PromptRenderer(tokenizer, chat=False)(asking({"role": "user", "content": "in the end"}))
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == "in the end"


def test_a_conversation_opens_the_assistants_turn(tokenizer):
    tokens = PromptRenderer(tokenizer, chat=True)(asking(*CHAT))
    expected = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nWhere is the Colosseum?<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(tokens.tolist()) == expected


def test_arguments_reach_the_template(tokenizer):
    tokens = PromptRenderer(tokenizer, chat=True, template={"think": False})(asking(*CHAT))
    assert tokenizer.decode(tokens.tolist()).endswith("<|start|>assistant\n(brief) ")


def test_a_conversation_without_a_template_is_refused(tokenizer):
    with pytest.raises(DataError, match="Prompt 5 is a conversation; render it with --apply-chat-template"):
        PromptRenderer(tokenizer, chat=False)(asking(*CHAT))


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(DataError, match="Prompt 5 renders to no token"):
        PromptRenderer(tokenizer, chat=False)(asking({"role": "user", "content": ""}))


def test_remembering_renderings_never_mixes_prompts_up(tokenizer):
    renderer = PromptRenderer(tokenizer, chat=False)
    for _ in range(2):
        for i in range(200):  # short-lived prompts: their memory is used again by the next ones
            text = f"question {i}"
            prompt = asking({"role": "user", "content": text})
            assert tokenizer.decode(renderer(prompt).tolist()) == text
            assert renderer(prompt) is renderer(prompt)


def answer(tokenizer, reply: str, sampling: SamplingParams, **kw):
    engine = Echo(tokenizer.encode, lambda seed: reply, end=tokenizer.eos_token_id)
    generate = SingleTurn(PromptRenderer(tokenizer, chat=True), tokenizer.text, **kw)
    return asyncio.run(generate(asking(*CHAT), engine, sampling)), engine


def test_a_trajectory_is_the_prompts_tokens_and_then_the_policys(tokenizer):
    trajectory, engine = answer(tokenizer, "In Rome.", SamplingParams(max_new_tokens=50))
    prompt, reply = trajectory.branches[0]
    assert (prompt.author, reply.author) == (Author.PROMPT, Author.POLICY)
    assert prompt.tokens.tolist() == engine.asked[0][0]
    assert reply.tokens[-1] == tokenizer.eos_token_id
    assert trajectory.status is Status.COMPLETED
    assert trajectory.metadata == {"text": "In Rome.", "reason": "stop"}


def test_a_trajectory_cut_at_the_limit_is_truncated(tokenizer):
    trajectory, _ = answer(tokenizer, "In Rome.", SamplingParams(max_new_tokens=3))
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.response_length == 3
    assert trajectory.metadata["reason"] == "length"


def test_the_text_ends_before_what_stopped_it_and_the_tokens_do_not(tokenizer):
    trajectory, _ = answer(tokenizer, "Rome</a> more", SamplingParams(max_new_tokens=50, stop=("</a>", "zzz")))
    assert trajectory.metadata["text"] == "Rome"
    assert trajectory.response_length > len(tokenizer.encode("Rome</a>"))
    (stop,) = tokenizer.encode("!")
    cut, _ = answer(tokenizer, "Rome!", SamplingParams(max_new_tokens=5, stop_token_ids=(stop,)))
    assert cut.metadata["text"] == "Rome"


def test_the_context_limit_shortens_the_trajectory(tokenizer):
    asked = len(PromptRenderer(tokenizer, chat=True)(asking(*CHAT)))
    trajectory, engine = answer(tokenizer, "In Rome.", SamplingParams(max_new_tokens=50), max_context_len=asked + 4)
    assert engine.asked[0][1].max_new_tokens == trajectory.response_length == 4
    with pytest.raises(DataError, match=r"Prompt 5 has .* no room for a reply in a context of"):
        answer(tokenizer, "In Rome.", SamplingParams(), max_context_len=asked)
