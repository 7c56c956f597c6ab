"""The body of OpenAI's ``/v1/completions``, read into wishes and how their replies are to be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from miles.backends.native.server.chat import NOT_HERE, Told, format_rule, told_of
from miles.backends.native.server.desk import MOST_TOPS
from miles.backends.native.server.drawing import draw_of, refuse_what_is_not_here
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.generate import MOST_WISHES, Errand, Prompt, rids_of, token_prompts
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.wish import Wish


def read_completions(
    body: Any, decode: Callable[[tuple[int, ...]], str], new_rid: Callable[[], str]
) -> tuple[Errand, Told]:
    """What a completions body asks for; ``decode`` spells prompts of tokens where they are echoed."""
    fields = Fields(body)
    refuse_what_is_not_here(fields, (*NOT_HERE, "suffix"))
    prompts, single = _prompts(fields)
    draw = draw_of(
        fields,
        limit=fields.integer("max_tokens", 16, low=1),
        min_new_tokens="min_tokens",
        seed="seed",
        rule=format_rule(fields),
    )
    best = fields.integer("best_of", draw.n)
    if best != draw.n:
        raise Refusal(f"best_of is {best}, but this server returns all it writes: leave it out, or let it be n.")
    if len(prompts) * draw.n > MOST_WISHES:
        raise Refusal(f"The request asks for {len(prompts) * draw.n} answers, but at most {MOST_WISHES} fit in one.")
    logprobs, echo = fields.maybe_integer("logprobs", low=0, high=MOST_TOPS), fields.flag("echo")
    rids = rids_of(fields, len(prompts), single=single, attempts=draw.n, new_rid=new_rid)
    wishes = tuple(
        Wish(
            prompt=prompt,
            draw=draw,
            rid=rids[i * draw.n + attempt],
            attempt=attempt,
            priority=fields.integer("priority", 0),
            logprobs=logprobs is not None,
            scores_from=0 if echo and logprobs else None,
            tops=logprobs or 0,
            words=True,
            experts_from=fields.integer("routed_experts_start_len", 0, low=0)
            if fields.flag("return_routed_experts")
            else None,
        )
        for i, prompt in enumerate(prompts)
        for attempt in range(draw.n)
    )
    token_ids = fields.flag("return_token_ids")
    echoed = (prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts) if echo else ()
    told = replace(
        told_of(fields, draw.n),
        logprobs=logprobs is not None,
        token_ids=token_ids,
        prompt_ids=token_ids,
        prompts=tuple(text for text in echoed for _ in range(draw.n)),
    )
    return Errand(wishes=wishes, single=False, stream=fields.flag("stream")), told


def _prompts(fields: Fields) -> tuple[list[Prompt], bool]:
    value = fields.raw("prompt")
    if isinstance(value, str):
        if not value:
            raise Refusal("prompt is empty.", param="prompt")
        return [value], True
    if not isinstance(value, list):
        raise fields.refuse("prompt", "a string, a list of strings, a list of tokens or a list of such lists")
    if value and all(isinstance(each, str) for each in value):
        if "" in value:
            raise Refusal("A prompt is empty.", param="prompt")
        return list(value), False
    return token_prompts(fields, "prompt")
