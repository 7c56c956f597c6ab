"""Every family: what is stored turn by turn is what its template writes of the whole, or differs as named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.rollout.session.cases import CASES, Case

from miles.core.protocols import Completion
from miles.core.types import Author, Span, Status, Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.session.audit import audit_session
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session, SessionReply

Of = Callable[[str], HfTokenizer]
pytestmark = pytest.mark.filterwarnings("ignore:The chat template does not render the tools")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ALL = sorted(CASES)
WITH_TOOLS = [name for name in ALL if CASES[name].tools]
APPENDING = [name for name in ALL if CASES[name].keeps]


class Talk:
    """A session whose policy samples a given script, in its family's format."""

    def __init__(self, name: str, tokenizer: HfTokenizer, *, sampled_end: bool = True) -> None:
        self.case: Case = CASES[name]
        self.tokenizer = tokenizer
        self.session = Session("s", build_renderer(tokenizer))
        self.tools = [WEATHER] if self.case.tools else []
        self.messages: list[Any] = []
        self.sampled_end = sampled_end
        self.called = 0

    def ask(self, *messages: dict[str, Any]) -> None:
        self.messages += messages
        self.turn = self.session.begin(self.messages, self.tools)

    def canonical(self) -> list[int]:
        """What the template itself writes of all that was said, through transformers."""
        tools: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        put = [self._plain(message) for message in self.messages]
        return self.tokenizer.apply_chat_template(put, add_generation_prompt=True, **tools)

    def say(self, text: str, thought: str = "", calls: tuple[dict[str, Any], ...] = ()) -> SessionReply:
        written = [self.case.call("weather", arguments, self.called + i) for i, arguments in enumerate(calls)]
        self.called += len(calls)
        words = self.case.said(thought if self.case.thinks else "", text, written)
        end = (self.case.end_of_call or self.case.end) if calls else self.case.end
        ids = self.tokenizer.encode(words + end)
        reply = self.session.end(self.turn, completion(ids if self.sampled_end else ids[:-1]))
        self.messages.append(reply.message)
        return reply

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """As a careful user of the template would hand it over."""
        put = dict(message)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if self.case.family == "gemma":
            put.pop("tool_calls", None)
            if calls:
                put["content"] = "\n".join(
                    json.dumps({"name": c["name"], "parameters": json.loads(c["arguments"])}) for c in calls
                )
            return {"role": "user", "content": put["content"]} if put["role"] == "tool" else put
        if self.case.family == "smollm" and calls:
            return {"role": "assistant", "content": "\n".join(_tagged(c) for c in calls)}
        if calls:
            if self.case.family == "deepseek":
                put["content"] = None
            else:
                put["tool_calls"] = [
                    call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                    for call in message["tool_calls"]
                ]
        if self.case.family == "harmony" and "reasoning_content" in put:
            put["thinking"] = put.pop("reasoning_content")
        return put


def _tagged(call: dict[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'


def completion(ids: list[int], reason: str = "stop", version: int = 0) -> Completion:
    span = Span(
        author=Author.POLICY,
        tokens=np.array(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        version=Version(number=version),
    )
    status = Status.COMPLETED if reason == "stop" else Status.TRUNCATED
    return Completion(spans=(span,), status=status, finish_reason=reason)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(reply: SessionReply, text: str, at: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply.message["tool_calls"][at]["id"], "content": text}


@pytest.mark.parametrize("name", ALL)
def test_a_family_is_told_by_what_its_template_writes(name: str, tokenizer_of: Of) -> None:
    assert build_renderer(tokenizer_of(name)).family.name == CASES[name].family


@pytest.mark.parametrize("sampled_end", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_one_question_behind_an_answer_is_as_the_template_writes_it(
    name: str, sampled_end: bool, tokenizer_of: Of
) -> None:
    talk = Talk(name, tokenizer_of(name), sampled_end=sampled_end)
    talk.ask({"role": "system", "content": "Be brief."}, user("the city?"))
    assert talk.turn.tokens.tolist() == talk.canonical()
    talk.say("Bonn", thought="the answer")
    talk.ask(user("and the weather?"))
    if CASES[name].keeps:
        assert talk.turn.tokens.tolist() == talk.canonical()
    stored, canonical = talk.turn.tokens.tolist(), talk.canonical()
    # What the template writes behind the answer is there to the token, whatever it makes of the answer.
    new = canonical[-(len(canonical) - _last_end(canonical, talk)) :]
    assert stored[-len(new) :] == new


def _last_end(tokens: list[int], talk: Talk) -> int:
    """Behind the mark that ends the last answer in a canonical rendering."""
    question = talk.tokenizer.encode("and the weather?")
    at = next(i for i in range(len(tokens), -1, -1) if tokens[i : i + len(question)] == question)
    marks = {talk.tokenizer.encode(mark)[0] for mark in talk.case.marks}
    heads = [i for i in range(at) if tokens[i] in marks]
    return heads[-1]


@pytest.mark.parametrize("sampled_end", [True, False])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_loop_of_calls_and_results_is_as_the_template_writes_it(
    name: str, sampled_end: bool, tokenizer_of: Of
) -> None:
    talk = Talk(name, tokenizer_of(name), sampled_end=sampled_end)
    talk.ask(user("the weather in Bonn?"))
    for days in (1, 2, 3):
        reply = talk.say("", thought=f"look {days}", calls=({"city": "Bonn", "days": days},))
        assert reply.finish_reason == "tool_calls"
        called = reply.message["tool_calls"][0]["function"]
        assert (called["name"], json.loads(called["arguments"])) == ("weather", {"city": "Bonn", "days": days})
        talk.ask(result(reply, f"fine {days}"))
        # The question is not yet past, so that even templates that forget thoughts have them all.
        assert talk.turn.tokens.tolist() == talk.canonical()


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in ("llama3", "gpt-oss", "gemma")])
def test_several_results_stand_as_the_template_puts_them(name: str, tokenizer_of: Of) -> None:
    talk = Talk(name, tokenizer_of(name))
    talk.ask(user("the weather?"))
    reply = talk.say("", thought="both", calls=({"city": "Bonn"}, {"city": "the city"}))
    assert len(reply.message["tool_calls"]) == 2
    talk.ask(result(reply, "fine"), result(reply, "fine too", at=1))
    assert talk.turn.tokens.tolist() == talk.canonical()


@pytest.mark.parametrize("name", ALL)
def test_a_long_conversation_differs_only_as_its_family_says(name: str, tokenizer_of: Of) -> None:
    talk = Talk(name, tokenizer_of(name))
    talk.ask(user("the weather in Bonn?"))
    for turn in range(3):
        if CASES[name].tools:
            reply = talk.say("", thought="I look", calls=({"city": "Bonn", "days": turn},))
            talk.ask(result(reply, "fine"))
        talk.say(f"the answer is {turn}", thought="and I know")
        talk.ask(user(f"and then, {turn}?"))
    talk.say("that is all", thought="done")
    found = audit_session(talk.session)
    assert found.refused == 0 and found.conversations == 1
    assert {kind for kind, count in found.counts.items() if count} <= set(
        talk.session.renderer.family.expected_mismatches
    ), found.mismatches
    if CASES[name].keeps:
        assert not found.mismatches
    else:
        assert found.counts["thinking"] > 0


@pytest.mark.parametrize("name", ALL)
def test_what_was_sampled_is_the_beginning_of_all_that_follows(name: str, tokenizer_of: Of) -> None:
    talk = Talk(name, tokenizer_of(name))
    talk.ask(user("the city?"))
    before: list[int] = []
    for turn in range(3):
        assert talk.turn.tokens.tolist()[: len(before)] == before
        assert talk.turn.reused == len(before)
        reply = talk.say(f"number {turn}", thought="hm")
        before = talk.session.tree.get_conversation(reply.number).tokens.tolist()
        assert reply.message["content"] == f"number {turn}"
        assert reply.message.get("reasoning_content") == ("hm" if CASES[name].thinks else None)
        talk.ask(user("and?"))


def test_an_end_that_was_sampled_otherwise_is_a_named_difference(tokenizer_of: Of) -> None:
    talk = Talk("llama3", tokenizer_of("llama3"))
    talk.ask(user("?"))
    ids = talk.tokenizer.encode("hello<|eom_id|>")
    talk.messages.append(talk.session.end(talk.turn, completion(ids)).message)
    talk.ask(user("!"))
    eom, eot = (talk.tokenizer.encode(mark)[0] for mark in ("<|eom_id|>", "<|eot_id|>"))
    behind = talk.turn.tokens.tolist()[talk.turn.reused :]
    assert talk.turn.tokens[talk.turn.reused - 1] == eom and behind[0] != eot
    talk.say("bye")
    assert {k for k, n in audit_session(talk.session).counts.items() if n} == {"boundary"}


def test_a_head_that_was_sampled_is_not_written_twice(tokenizer_of: Of) -> None:
    talk = Talk("glm", tokenizer_of("glm"))
    user_mark = talk.tokenizer.encode("<|user|>")[0]
    talk.ask(user("a"))
    talk.say("b")
    talk.ask(user("c"))
    assert talk.turn.tokens.tolist().count(user_mark) == 2


@pytest.mark.parametrize("end", ["<|observation|>", "<|endoftext|>"])
def test_another_end_than_the_next_head_stays_and_the_head_is_written(end: str, tokenizer_of: Of) -> None:
    talk = Talk("glm", tokenizer_of("glm"))
    talk.ask(user("a"))
    talk.messages.append(talk.session.end(talk.turn, completion(talk.tokenizer.encode(f"b{end}"))).message)
    talk.ask(user("c"))
    assert talk.tokenizer.decode(talk.turn.tokens.tolist()).endswith(f"b{end}<|user|>\nc<|assistant|>")
    talk.say("d")
    assert audit_session(talk.session).counts["unknown"] == 0


def test_an_end_the_model_took_for_another_is_followed_by_the_true_one(tokenizer_of: Of) -> None:
    talk = Talk("qwen2.5", tokenizer_of("qwen2.5"))
    talk.ask(user("a"))
    reply = talk.session.end(talk.turn, completion(talk.tokenizer.encode("b<|endoftext|>")))
    assert reply.message["content"] == "b"
    talk.messages.append(reply.message)
    talk.ask(user("c"))
    assert "b<|endoftext|><|im_end|>\n<|im_start|>user\nc" in talk.tokenizer.decode(talk.turn.tokens.tolist())


def test_a_turn_opened_without_thoughts_is_answered_without_their_line(tokenizer_of: Of) -> None:
    session = Session("s", build_renderer(tokenizer_of("glm")))
    turn = session.begin([user("a")], enable_thinking=False)
    reply = session.end(turn, completion(tokenizer_of("glm").encode("\nyes<|user|>")))
    assert reply.message["content"] == "yes"


def test_a_result_is_taken_though_its_call_could_not_be_read(tokenizer_of: Of) -> None:
    for name in WITH_TOOLS:
        talk = Talk(name, tokenizer_of(name))
        talk.ask(user("a"))
        reply = talk.session.end(talk.turn, completion(talk.tokenizer.encode("<tool_call>{oops" + talk.case.end)))
        assert "tool_calls" not in reply.message
        reported = {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "that was no call"}
        turn = talk.session.begin([user("a"), reply.message, reported], talk.tools)
        assert "that was no call" in talk.tokenizer.decode(turn.tokens[turn.reused :].tolist())


def test_a_word_about_the_coming_turn_alone_keeps_the_conversation(tokenizer_of: Of) -> None:
    session = Session("s", build_renderer(tokenizer_of("qwen3")))
    turn = session.begin([user("a")], enable_thinking=True)
    reply = session.end(turn, completion(tokenizer_of("qwen3").encode("<think>\nx\n</think>\n\nb<|im_end|>")))
    more = session.begin([user("a"), reply.message, user("c")], enable_thinking=False)
    assert more.reused == len(turn.tokens) + reply.completion_tokens
    assert session.renderer.decode(more.tokens.tolist()).endswith("<think>\n\n</think>\n\n")
