"""Images in conversations: exact tokens across turns whichever turn has them, and nothing dropped silently."""

import asyncio

import numpy as np
import pytest
from tests.models.small_vision import KINDS, draw_image, draw_png, write_processor

from miles.core.image_files import encode_data_url
from miles.core.media import find_placeholders
from miles.core.media_store import MediaStore
from miles.core.protocols import Completion
from miles.core.types import Author, Span, Status, Version
from miles.models.processor import load_processor
from miles.models.tokenizer import load_tokenizer
from miles.rollout.images import inline_images
from miles.rollout.serving.errors import SessionError
from miles.rollout.session.audit import audit_session
from miles.rollout.session.fallback_renderer import FallbackRenderer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session


@pytest.fixture(params=KINDS)
def processor(request, tmp_path):
    return load_processor(write_processor(tmp_path / "model", request.param), media=MediaStore(tmp_path / "media"))


@pytest.fixture(params=["family", "fallback"])
def session(request, processor):
    if request.param == "family":
        return Session("s", build_renderer(processor))
    return Session("s", FallbackRenderer(processor, end_tokens=processor.encode("<|im_end|>")))


def image(seed):
    return {"type": "image_url", "image_url": {"url": encode_data_url(draw_png(seed, 40 + 8 * seed, 32))}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def reply_with(session, turn, processor, text):
    tokens = np.array(processor.encode(text), np.int32)
    span = Span(author=Author.POLICY, tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), version=Version())
    return session.end(turn, Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop"))


def begin(session, messages):
    return session.begin(asyncio.run(session.prepare(messages)))


def check_images(turn, processor, seeds):
    assert [placed.image.source for placed in turn.images] == [
        processor.media.put(draw_png(seed, 40 + 8 * seed, 32)).removeprefix("sha256:") for seed in seeds
    ]
    for placed in turn.images:
        assert len(find_placeholders(turn.tokens, placed, processor.image_token_id)) == placed.length


def test_tokens_stay_exact_whichever_turn_has_the_images(session, processor, tmp_path):
    messages = [user("what is ", image(0), "?")]
    first = begin(session, messages)
    check_images(first, processor, [0])
    one = reply_with(session, first, processor, "a dot<|im_end|>")
    messages += [one.message, user("and ", image(1), image(2), "?")]
    second = begin(session, messages)
    check_images(second, processor, [0, 1, 2])
    assert second.reused == len(first.tokens) + one.completion_tokens
    assert second.tokens[: len(first.tokens)].tolist() == first.tokens.tolist()
    two = reply_with(session, second, processor, "two<|im_end|>")
    third = begin(session, [*messages, two.message, user("sure?")])
    check_images(third, processor, [0, 1, 2])
    reply_with(session, third, processor, "yes<|im_end|>")
    report = audit_session(session)
    assert not report.mismatches and not report.refused
    (branch,) = session.trajectory(status=Status.COMPLETED).branches
    assert [len(span.images) for span in branch if span.author is not Author.POLICY] == [1, 2, 0]
    assert len(list((tmp_path / "media").iterdir())) == 3


def test_a_conversation_with_another_image_replays_nothing(session, processor):
    first = begin(session, [user("what is ", image(0))])
    one = reply_with(session, first, processor, "a dot<|im_end|>")
    same = begin(session, [user("what is ", image(0)), one.message, user("?")])
    assert same.reused > len(first.tokens)
    other = begin(session, [user("what is ", image(1)), one.message, user("?")])
    assert other.reused == 0


def test_environments_may_give_images_as_objects_and_bytes(session, processor):
    given = user("?", {"type": "image", "image": draw_image(3)}, {"type": "image", "image": draw_png(4)})
    turn = begin(session, [given])
    assert len(turn.images) == 2
    shown = inline_images(turn.messages, processor.media)
    assert [part["type"] for part in shown[0]["content"]] == ["text", "image_url", "image_url"]
    assert begin(session, shown).tokens.tolist() == turn.tokens.tolist()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, r"messages\[1\].content\[1\]: the"),
        ({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "is a URL, and this server fetches none"),
        ({"type": "image", "image": "sha256:" + 64 * "0"}, "is not in this run"),
        ({"type": "image", "image": 3}, "is a int, and not base64"),
        ({"type": "image"}, "part has no image"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "a part of type 'video_url'; only text and images"),
        ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'"),
    ],
)
def test_what_cannot_be_read_is_refused_and_leaves_the_session_as_it_was(part, reason, processor):
    session = Session("s", build_renderer(processor))
    with pytest.raises(SessionError, match=reason):
        begin(session, [user("a"), user("look ", part)])
    assert not len(session.tree) and not session.num_pending


def test_too_many_images_are_refused(processor):
    session = Session("s", build_renderer(processor))
    with pytest.raises(SessionError, match="more than 64 images"):
        begin(session, [user(*[image(0)] * 65)])


def test_a_model_that_reads_text_refuses_images(tmp_path):
    tokenizer = load_tokenizer(write_processor(tmp_path, "qwen2_vl"))
    with pytest.raises(SessionError, match="reads text only"):
        begin(Session("s", build_renderer(tokenizer)), [user("a", image(0))])
