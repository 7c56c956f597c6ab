"""The body of SGLang's ``/generate``, read into wishes: one prompt or many, text or tokens, ``n`` answers each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.native.server.drawing import MOST_ATTEMPTS, read_draw, refuse_what_is_not_here
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.refusal import Refusal, malformed
from miles.backends.native.server.wish import Draw, Turn, Wish

MOST_WISHES = 65536
_NOT_HERE = (
    *("input_embeds", "image_data", "video_data", "audio_data", "lora_path", "custom_logit_processor"),
    *("return_hidden_states", "return_sampling_mask", "return_indexer_topk", "background"),
    *("bootstrap_host", "bootstrap_room", "return_flat_raw_top_logprobs", "multi_item_delimiter_indices"),
)

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """Everything one call asks for. ``single``: the reply is one object and not a list."""

    wishes: tuple[Wish, ...]
    single: bool
    stream: bool


def read_generate(body: Any, new_rid: Callable[[], str]) -> Errand:
    """What a ``/generate`` body asks for."""
    fields = Fields(body)
    refuse_what_is_not_here(fields, _NOT_HERE)
    prompts, single = read_prompts(fields)
    draws = _each_draw(fields, len(prompts), single)
    attempts = draws[0].n
    if len(prompts) * attempts > MOST_WISHES:
        raise Refusal(f"The request asks for {len(prompts) * attempts} answers, but at most {MOST_WISHES} fit in one.")
    rids = rids_of(fields, len(prompts), single=single, attempts=attempts, new_rid=new_rid)
    logprobs = _each(fields, "return_logprob", len(prompts), single, _flag, False)
    starts = _each(fields, "logprob_start_len", len(prompts), single, _start, -1)
    tops = _each(fields, "top_logprobs_num", len(prompts), single, _count, 0)
    watches = _watches(fields, len(prompts), single)
    priority = fields.integer("priority", 0)
    words, tell_prompt = fields.flag("return_text_in_logprobs"), fields.flag("return_prompt_token_ids")
    tell_versions = fields.flag("return_weight_versions")
    turns = _turns(fields, len(prompts), single, attempts)
    experts = fields.integer("routed_experts_start_len", 0, low=0) if fields.flag("return_routed_experts") else None
    wishes = tuple(
        Wish(
            prompt=prompt,
            draw=draws[i],
            rid=rids[i * attempts + attempt],
            attempt=attempt,
            priority=priority,
            logprobs=logprobs[i],
            scores_from=starts[i] if logprobs[i] and starts[i] >= 0 else None,
            tops=tops[i] if logprobs[i] else 0,
            watch=watches[i] if logprobs[i] else (),
            words=words,
            experts_from=experts,
            tell_prompt=tell_prompt,
            tell_versions=tell_versions,
            turn=turns[i],
        )
        for i, prompt in enumerate(prompts)
        for attempt in range(attempts)
    )
    return Errand(wishes=wishes, single=single and attempts == 1, stream=fields.flag("stream"))


def read_prompts(fields: Fields) -> tuple[list[Prompt], bool]:
    """The prompts, and whether there is just one that did not come in a list. Tokens go before text."""
    if "input_ids" in fields:
        return token_prompts(fields, "input_ids")
    if "text" not in fields:
        raise Refusal("A prompt is missing: give text or input_ids.")
    value = fields.raw("text")
    if isinstance(value, str):
        return [value], True
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise fields.refuse("text", "a string or a list of strings")
    if not value:
        raise Refusal("text is an empty list, but must hold at least one prompt.", param="text")
    return list(value), False


def token_prompts(fields: Fields, name: str) -> tuple[list[Prompt], bool]:
    """One list of tokens, or a list of such."""
    value = fields.array(name) or []
    if not value:
        raise Refusal(f"{name} is empty, but a prompt has at least one token.", param=name)
    single = not isinstance(value[0], list)
    prompts: list[Prompt] = []
    for tokens in [value] if single else value:
        if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
            raise malformed(f"{name} must be a list of integers, or a list of such lists.", name)
        if not tokens:
            raise Refusal(f"A prompt in {name} is empty, but a prompt has at least one token.", param=name)
        prompts.append(tuple(tokens))
    return prompts, single


def rids_of(fields: Fields, prompts: int, *, single: bool, attempts: int, new_rid: Callable[[], str]) -> list[str]:
    """A name for each answer, from the names given: one is a prefix where several answers are wanted."""
    value = fields.raw("rid")
    if value is None or value == "":
        return [new_rid() for _ in range(prompts * attempts)]
    if isinstance(value, str):
        return [value] if single and attempts == 1 else [f"{value}_{i}" for i in range(prompts * attempts)]
    if not isinstance(value, list) or not all(isinstance(rid, str) for rid in value):
        raise fields.refuse("rid", "a string or a list of strings")
    if len(value) != prompts:
        raise Refusal(f"rid names {len(value)} requests, but there are {prompts}.", param="rid")
    if len(set(value)) != len(value):
        twice = next(rid for rid in value if value.count(rid) > 1)
        raise Refusal(f"rid names two requests {twice!r}, but names must differ.", param="rid")
    return value if attempts == 1 else [f"{rid}_{i}" for rid in value for i in range(attempts)]


def _each_draw(fields: Fields, count: int, single: bool) -> list[Draw]:
    value = fields.raw("sampling_params")
    if value is None:
        value = {}
    if isinstance(value, dict):
        return [read_draw(value)] * count
    if not isinstance(value, list):
        raise fields.refuse("sampling_params", "an object or a list of objects")
    if single or len(value) != count:
        raise Refusal(
            f"sampling_params is a list of {len(value)}, but there {'is one prompt' if single else f'are {count}'}.",
            param="sampling_params",
        )
    draws = [read_draw(each) for each in value]
    if len({draw.n for draw in draws}) > 1:
        raise Refusal("sampling_params.n must be the same for all prompts of a request.", param="sampling_params")
    return draws


def _each(
    fields: Fields, name: str, count: int, single: bool, read: Callable[[Fields, str], Any], default: Any
) -> list[Any]:
    """A field that may be given once for all prompts, or once for each."""
    value = fields.raw(name)
    if value is None:
        return [default] * count
    if single or not isinstance(value, list):
        return [read(fields, name)] * count
    if len(value) != count:
        raise Refusal(f"{name} is a list of {len(value)}, but there are {count} prompts.", param=name)
    return [default if each is None else read(Fields({name: each}), name) for each in value]


def _flag(fields: Fields, name: str) -> bool:
    return fields.flag(name)


def _start(fields: Fields, name: str) -> int:
    value = fields.integer(name, -1)
    if value < -1:
        raise fields.refuse(name, "-1 (no prompt token) or more")
    return value


def _count(fields: Fields, name: str) -> int:
    """Less than none is none, as SGLang has it."""
    return max(0, fields.integer(name, 0))


def _watches(fields: Fields, count: int, single: bool) -> Sequence[tuple[int, ...]]:
    value = fields.array("token_ids_logprob")
    if not value:
        return [()] * count
    if single or not isinstance(value[0], list):
        return [fields.integers("token_ids_logprob")] * count
    if len(value) != count:
        raise Refusal(f"token_ids_logprob is a list of {len(value)}, but there are {count} prompts.")
    return [Fields({"token_ids_logprob": each}).integers("token_ids_logprob") for each in value]


def _turns(fields: Fields, count: int, single: bool, attempts: int) -> Sequence[Turn | None]:
    """Where each prompt stands in a session; one object for one prompt, or a list."""
    if "session_params" not in fields:
        return [None] * count
    if attempts > 1:
        raise Refusal("A session goes on behind one answer: ask for one at a time (n).", param="session_params")
    value = fields.raw("session_params")
    if single or not isinstance(value, list):
        return [_turn(fields.needed_object("session_params"))] * count
    if len(value) != count:
        raise Refusal(f"session_params is a list of {len(value)}, but there are {count} prompts.")
    return [None if each is None else _turn(fields.inner(each, "session_params")) for each in value]


def _turn(fields: Fields) -> Turn | None:
    """SGLang's ``session_params``; without an id they say nothing."""
    session = fields.text("id")
    behind, offset = fields.text("rid"), fields.integer("offset", 0)
    if session is None:
        return None
    return Turn(
        session=session,
        behind=behind,
        offset=offset,
        replace=fields.flag("replace"),
        drop_output=fields.flag("drop_previous_output"),
    )


assert MOST_ATTEMPTS <= MOST_WISHES
