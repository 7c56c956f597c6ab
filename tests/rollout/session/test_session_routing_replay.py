"""Routing replay in sessions: experts of prompts, tool results and a response's last token come with the next turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tests.rollout.session.test_families import completion, user

from miles.core.types import Array, Author
from miles.models.tokenizer import HfTokenizer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session

NONE = 255


def recorded(position: int, count: int) -> Array:
    """An engine's record: each token's experts are its place."""
    return np.arange(position, position + count, dtype=np.uint8).reshape(count, 1, 1)


def test_all_tokens_of_all_turns_but_the_last_have_experts(tokenizer_of: Callable[[str], HfTokenizer]) -> None:
    qwen = tokenizer_of("qwen2.5")
    session = Session("s", build_renderer(qwen))
    messages = [user("the city?")]
    for words in ("the answer", "another", "the end"):
        turn = session.begin(messages)
        tokens = qwen.encode(words + "<|im_end|>")
        found = completion(tokens)
        routed = recorded(len(turn.tokens), len(tokens)).copy()
        routed[-1] = NONE
        spans = tuple(replace(span, extras={"routed_experts": routed}) for span in found.spans)
        given = {"routed_experts": recorded(0, len(turn.tokens))}
        reply = session.end(turn, replace(found, spans=spans, prompt_extras=given))
        messages = [*messages, reply.message, user("and?")]
    (branch,) = session.trajectory(status=found.status).branches
    assert {span.author for span in branch} == set(Author)
    whole = np.concatenate([span.extras["routed_experts"] for span in branch])[:, 0, 0].tolist()
    assert whole == [*range(len(whole) - 1), NONE]
