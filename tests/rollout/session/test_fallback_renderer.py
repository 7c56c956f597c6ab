"""A template of no known family: followed where it only appends, refused where it rewrites."""

from __future__ import annotations

import pytest
from tests.rollout.session.cases import CASES, save_tokenizer
from tests.rollout.session.templates import FORGETFUL, PLAIN
from tests.rollout.session.test_families import WEATHER, completion, user

from miles.core.errors import UsageError
from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.errors import SessionError
from miles.rollout.session.fallback_renderer import FallbackRenderer
from miles.rollout.session.families import FAMILIES
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session
from miles.rollout.session.template import TemplateRenderer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return save_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN, ("<s>", "</s>"), "</s>")


def test_an_unknown_family_is_followed_with_a_warning(plain: HfTokenizer) -> None:
    with pytest.warns(UserWarning, match="No renderer is registered"):
        renderer = build_renderer(plain)
    assert isinstance(renderer, FallbackRenderer)
    for end in ("</s>", ""):
        session = Session("s", renderer)
        messages = [user("the city?")]
        for word in ("Bonn", "the answer"):
            turn = session.begin(messages)
            reply = session.end(turn, completion(plain.encode(word + end)))
            assert reply.message["content"] == word
            messages += [reply.message, user("and?")]
        assert session.begin(messages).tokens.tolist() == plain.apply_chat_template(
            messages, add_generation_prompt=True
        )


def test_a_template_that_rewrites_is_refused_where_it_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("forgetful"), FORGETFUL, ("<s>", "</s>"), "</s>")
    with pytest.warns(UserWarning):
        session = Session("s", build_renderer(tokenizer))
    reply = session.end(session.begin([user("a")]), completion(tokenizer.encode("b</s>")))
    with pytest.raises(SessionError, match="rewrites earlier turns"):
        session.begin([user("a"), reply.message, user("c")])


def test_tools_the_template_says_nothing_of_are_warned_of_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = CASES["gemma"]
    renderer = build_renderer(save_tokenizer(tmp_path_factory.mktemp("gemma"), case.template, case.marks, case.end))
    with pytest.warns(UserWarning, match="describe them in the system message") as warned:
        for _ in range(2):
            renderer.render_prompt([user("a")], [WEATHER])
    assert len(warned) == 1


def test_a_tokenizer_without_a_template_is_refused_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("none"), "", ("<s>", "</s>"), "</s>")
    with pytest.raises(UsageError, match="no chat template"):
        build_renderer(tokenizer)


def test_a_family_named_by_hand_must_be_one_and_fit(plain: HfTokenizer) -> None:
    with pytest.raises(UsageError, match=r"no session family 'qwen9'; choose one of .*qwen3"):
        build_renderer(plain, family="qwen9")
    with pytest.raises(UsageError, match=r"has no token .*which ends a turn of the family qwen"):
        TemplateRenderer(plain, FAMILIES[-1])
