"""Replies as SGLang's ``/generate`` writes them: text, tokens and ``meta_info``, whole or piece by piece."""

from __future__ import annotations

from typing import Any

from miles.backends.native.request import Finish
from miles.backends.native.server.reply import Lines, Reply
from miles.core.routed import to_sglang


def body_of(reply: Reply, since: int | None = None, text_since: int = 0) -> dict[str, Any]:
    """All there is of a reply so far; or only what came since a token and a character, for streams of differences."""
    wish = reply.wish
    body: dict[str, Any] = {}
    text = reply.text
    if text is not None:
        body["text"] = text[text_since:]
    body["output_ids"] = reply.tokens[since or 0 :]
    body["meta_info"] = _meta(reply, since or 0)
    if wish.tell_prompt:
        body["prompt_token_ids"] = [int(token) for token in reply.prompt]
    return body


def _meta(reply: Reply, since: int) -> dict[str, Any]:
    answer, wish = reply.answer, reply.wish
    cached = answer.cached_tokens
    meta: dict[str, Any] = {
        "id": wish.rid,
        "finish_reason": reason_of(reply.finish),
        "prompt_tokens": len(reply.prompt),
        "weight_version": reply.version,
        "num_retractions": answer.preemptions,
        "queue_time": answer.queue_seconds,
    }
    if wish.tell_versions:
        meta["weight_versions"] = reply.versions
    if wish.logprobs:
        meta |= _logprobs(reply, since)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(reply.tokens),
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
    }
    experts = None if reply.finish is None else experts_of(reply)
    if experts is not None:
        meta["routed_experts"] = experts
    if reply.ended is not None:
        meta["e2e_latency"] = reply.ended - reply.started
    return meta


def reason_of(finish: Finish | None) -> dict[str, Any] | None:
    """SGLang's ``finish_reason``."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": finish.length}
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def _logprobs(reply: Reply, since: int) -> dict[str, Any]:
    wish, output, given = reply.wish, reply.output, reply.input() if reply.wish.scores_from is not None else Lines()
    told: dict[str, Any] = {
        "input_token_logprobs": given.tokens,
        "output_token_logprobs": output.tokens[since:] if since else output.tokens,
        "output_token_logprobs_length": len(output.tokens),
    }
    if wish.tops:
        told["input_top_logprobs"] = given.tops
        told["output_top_logprobs"] = output.tops[since:] if since else output.tops
    if wish.watch:
        told["input_token_ids_logprobs"] = given.watched
        told["output_token_ids_logprobs"] = output.watched[since:] if since else output.watched
    return told


def experts_of(reply: Reply) -> str | None:
    """The experts of every token but the last, from where they were asked for, in base64 of int32.

    That is [tokens, layers, experts a token]; None where the model has none. An expert -1 was not recorded.
    """
    first = reply.wish.experts_from
    routed = None if first is None else reply.answer.routed(first)
    if routed is None:
        return None
    return to_sglang(routed)
