"""A session keeps what was sampled: replays, branches, refusals, and what it gives to training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.rollout.session.test_families import WEATHER, completion, result, user

from miles.core.protocols import Completion
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory, Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.errors import SessionError
from miles.rollout.session.match import MATCHERS
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session, SessionReply, SessionTurn

Of = Callable[[str], HfTokenizer]


@pytest.fixture
def qwen(tokenizer_of: Of) -> HfTokenizer:
    return tokenizer_of("qwen2.5")


@pytest.fixture
def session(qwen: HfTokenizer) -> Session:
    return Session("s1", build_renderer(qwen), match=MATCHERS["loose_tool_call"])


def say(session: Session, turn: SessionTurn, words: str, qwen: HfTokenizer, **how: Any) -> SessionReply:
    return session.end(turn, completion(qwen.encode(words + "<|im_end|>"), **how))


def trained(trajectory: Trajectory) -> list[list[int]]:
    """The tokens trained on, a list for each branch."""
    return [
        [int(t) for span in branch if span.author is Author.POLICY for t in span.tokens]
        for branch in trajectory.branches
    ]


def test_a_replayed_conversation_keeps_its_tokens_however_they_were_drawn(session: Session, qwen: HfTokenizer) -> None:
    turn = session.begin([user("the city?")])
    letters = [qwen.encode(letter)[0] for letter in "the answer"]  # never how a tokenizer would write it
    assert letters != qwen.encode("the answer")
    reply = session.end(turn, completion([*letters, *qwen.encode("<|im_end|>")]))
    more = session.begin([user("the city?"), reply.message, user("and?")])
    assert more.tokens[len(turn.tokens) :].tolist()[: len(letters)] == letters
    assert more.reused == len(turn.tokens) + len(letters) + 1


def test_only_what_is_new_is_tokenised(qwen: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = HfTokenizer.encode
    session = Session("s", build_renderer(qwen))
    monkeypatch.setattr(HfTokenizer, "encode", lambda self, text: [encoded.append(text), encode(self, text)][1])
    reply = say(session, session.begin([user("the first question")]), "the first answer", qwen)
    encoded.clear()
    session.begin([user("the first question"), reply.message, user("another")])
    assert encoded == ["<|im_end|>\n<|im_start|>user\nanother<|im_end|>\n<|im_start|>assistant\n"]
    encoded.clear()
    session.begin([user("the first question"), reply.message, user("another")])
    assert not encoded


def test_a_retry_is_a_second_reply_to_one_question(session: Session, qwen: HfTokenizer) -> None:
    first = session.begin([user("a")])
    say(session, first, "one", qwen)
    again = session.begin([user("a")])
    assert again.reused == len(again.tokens) and again.question == first.question
    say(session, again, "two", qwen)
    got = session.trajectory(status=Status.COMPLETED)
    assert trained(got) == [qwen.encode("one<|im_end|>"), qwen.encode("two<|im_end|>")]


def test_an_edit_is_a_branch_and_what_it_shares_trains_once(session: Session, qwen: HfTokenizer) -> None:
    one = say(session, session.begin([user("a")]), "one", qwen)
    head = [user("a"), one.message]
    say(session, session.begin([*head, user("b")]), "two", qwen)
    say(session, session.begin([*head, user("c")]), "three", qwen)
    got = session.trajectory(status=Status.COMPLETED)
    assert [qwen.decode(tokens) for tokens in trained(got)] == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]
    shared = got.branches[1][1]
    assert shared.author is Author.ENV and shared.logprobs is None
    assert qwen.decode(shared.tokens.tolist()) == "one<|im_end|>"


def test_an_edited_reply_is_read_and_not_trained(session: Session, qwen: HfTokenizer) -> None:
    one = say(session, session.begin([user("a")]), "one", qwen)
    two = say(session, session.begin([user("a"), one.message, user("b")]), "two", qwen)
    changed = dict(two.message) | {"content": "not two"}
    turn = session.begin([user("a"), one.message, user("b"), changed, user("c")])
    assert turn.reused == len(session.tree.get_conversation(one.number).tokens)
    assert qwen.decode(turn.tokens.tolist()).count("not two") == 1
    say(session, turn, "three", qwen)
    assert sum(map(len, trained(session.trajectory(status=Status.COMPLETED)))) == sum(
        len(qwen.encode(word)) + 1 for word in ("one", "two", "three")
    )


def test_a_sub_agent_and_a_compacted_context_are_conversations_of_their_own(
    session: Session, qwen: HfTokenizer
) -> None:
    main = session.begin([user("a")])
    sub = session.begin([{"role": "system", "content": "You are another."}, user("part of a")])
    assert session.num_pending == 2
    say(session, sub, "sub", qwen)
    one = say(session, main, "main", qwen)
    say(session, session.begin([user("a, of which the sum is: main")]), "done", qwen)
    got = session.trajectory(status=Status.COMPLETED, reward=Reward(value=1.0), index=3)
    assert [qwen.decode(tokens)[:4] for tokens in trained(got)] == ["sub<", "main", "done"]
    assert got.metadata["text"] == "done" and got.metadata["turns"] == 3 and got.index == 3
    assert one.message["content"] == "main"


def test_turns_under_way_at_once_do_not_see_each_other(session: Session, qwen: HfTokenizer) -> None:
    turns = [session.begin([user("a")]) for _ in range(3)]
    replies = [say(session, turn, word, qwen) for turn, word in zip(turns, ("x", "y", "z"), strict=True)]
    more = [session.begin([user("a"), reply.message, user("b")]) for reply in replies]
    for turn, word in zip(more, ("x", "y", "z"), strict=True):
        assert f"assistant\n{word}<|im_end|>" in qwen.decode(turn.tokens.tolist())


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_reply_that_was_cut_cannot_be_extended_but_asked_again(
    session: Session, qwen: HfTokenizer, reason: str
) -> None:
    turn = session.begin([user("a")])
    cut = session.end(turn, completion(qwen.encode("the ans"), reason))
    assert cut.finish_reason == reason
    before = len(session.tree)
    with pytest.raises(SessionError, match=r"message 2 was .* cannot be extended"):
        session.begin([user("a"), cut.message, user("go on")])
    assert len(session.tree) == before
    say(session, session.begin([user("a")]), "the answer", qwen)
    assert len(trained(session.trajectory(status=Status.COMPLETED))) == 2


def test_of_two_replies_in_the_same_words_the_one_that_ended_goes_on(session: Session, qwen: HfTokenizer) -> None:
    first = session.begin([user("a")])
    whole = say(session, first, "the", qwen)
    session.end(session.begin([user("a")]), completion(qwen.encode("the"), "length"))
    turn = session.begin([user("a"), whole.message, user("b")])
    assert turn.reused == len(first.tokens) + whole.completion_tokens


def test_other_tools_are_another_conversation(session: Session, qwen: HfTokenizer) -> None:
    one = say(session, session.begin([user("a")]), "one", qwen)
    turn = session.begin([user("a"), one.message, user("b")], [WEATHER])
    assert turn.reused == 0 and "weather" in qwen.decode(turn.tokens.tolist())


def test_versions_and_extras_are_kept_as_the_engine_gave_them(session: Session, qwen: HfTokenizer) -> None:
    turn = session.begin([user("a")])
    spans = tuple(
        Span(
            author=Author.POLICY,
            tokens=np.array([n, n + 1], np.int32),
            logprobs=np.array([-n, -n - 1], np.float32),
            version=Version(number=n),
            extras={"routed_experts": np.full((2, 3), n, np.uint8), "top_tokens": np.full((2, 4), n, np.int32)},
        )
        for n in (5, 6)
    )
    one = session.end(turn, Completion(spans=spans, status=Status.COMPLETED, finish_reason="stop"))
    for word in "bc":
        say(session, session.begin([user("a"), one.message, user(word)]), word, qwen)
    first, second = session.trajectory(status=Status.COMPLETED).branches
    assert first[1] is spans[0] and first[2] is spans[1]
    assert second[1].extras["routed_experts"].tolist() == [[5] * 3] * 2 and "top_tokens" not in second[1].extras


def test_a_match_of_ones_own_says_what_replays(qwen: HfTokenizer) -> None:
    session = Session("s", build_renderer(qwen), match=lambda stored, given: stored["role"] == given["role"])
    turn = session.begin([user("a")])
    reply = say(session, turn, "one", qwen)
    other = session.begin([user("A"), {"role": "assistant", "content": "whatever"}, user("b")])
    assert other.reused == len(turn.tokens) + reply.completion_tokens


def test_a_conversation_that_leaves_no_room_is_refused_with_the_mend(qwen: HfTokenizer) -> None:
    session = Session("s", build_renderer(qwen), max_context_len=40)
    assert session.begin([user("a")]).max_new_tokens == 40 - len(session.begin([user("a")]).tokens)
    with pytest.raises(SessionError, match="no room for a reply in a context of 40"):
        session.begin([user("a " * 40)])


@pytest.mark.parametrize("messages", [[], [user("a"), {"role": "assistant", "content": "b"}]])
def test_a_request_that_asks_nothing_is_refused(session: Session, messages: list[Any]) -> None:
    with pytest.raises(SessionError, match=r"Session s1: .*send"):
        session.begin(messages)


def test_an_abandoned_turn_leaves_nothing_to_train(session: Session, qwen: HfTokenizer) -> None:
    turn = session.begin([user("a")])
    session.abandon(turn)
    session.abandon(turn)
    got = session.trajectory(status=Status.FAILED)
    assert trained(got) == [[]] and got.metadata["reason"] == "abort" and got.metadata["text"] == ""


def test_a_session_nobody_asked_shows_its_prompt_or_says_so(qwen: HfTokenizer) -> None:
    prompt = Prompt(id=1, messages=[user("a")])
    shown = Session("s", build_renderer(qwen), prompt=prompt).trajectory(status=Status.FAILED)
    assert shown.branches[0][0].tokens.tolist() == qwen.apply_chat_template([user("a")], add_generation_prompt=True)
    with pytest.raises(SessionError, match="never got a request"):
        Session("s", build_renderer(qwen)).trajectory(status=Status.FAILED)


def test_a_pick_chooses_the_conversations_that_train(session: Session, qwen: HfTokenizer) -> None:
    for word in ("one", "two"):
        say(session, session.begin([user("a")]), word, qwen)
    got = session.trajectory(status=Status.COMPLETED, pick=lambda conversations: conversations[:1])
    assert [qwen.decode(tokens) for tokens in trained(got)] == ["one<|im_end|>"] and got.metadata["text"] == "one"


def test_an_empty_reply_is_no_branch_beside_others(session: Session, qwen: HfTokenizer) -> None:
    session.end(session.begin([user("a")]), Completion(spans=(), status=Status.ABORTED, finish_reason="abort"))
    say(session, session.begin([user("a")]), "one", qwen)
    assert len(session.trajectory(status=Status.COMPLETED).branches) == 1


def test_calls_are_given_ids_of_their_own_and_found_again_by_them(session: Session, qwen: HfTokenizer) -> None:
    words = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    turns = [session.begin([user("a")], [WEATHER]) for _ in range(2)]
    one, two = (say(session, turn, words, qwen) for turn in turns)
    assert one.message["tool_calls"][0]["id"] != two.message["tool_calls"][0]["id"]
    for reply in (one, two):
        turn = session.begin([user("a"), reply.message, result(reply, "fine")], [WEATHER])
        assert session.tree[turn.question].parent == reply.number
