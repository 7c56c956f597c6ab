"""SGLang's ``sampling_params`` object, and the same names in an OpenAI body, read into a ``Draw``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from miles.backends.native.server.fields import Fields
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.wish import Draw, Rule
from miles.core.fields import as_integer, as_number
from miles.core.protocols import Sampling

GREEDY = 1e-6
MOST = 1e6
ANY_JSON = "$$ANY$$"
MOST_ATTEMPTS = 4096

_KNOWN = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "sampling_seed"),
        "sampling_drawn",
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "no_stop_trim"),
        *("json_schema", "regex", "ebnf", "structural_tag"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval", "custom_params"),
    )
)
_NOT_HERE = ("structural_tag", "custom_params")


def read_draw(value: Any) -> Draw:
    """The ``sampling_params`` of one request; what is missing or null is as SGLang has it."""
    fields = Fields(value, "sampling_params", malformed=False)
    for name in fields:
        if name not in _KNOWN:
            close = get_close_matches(str(name), _KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise Refusal(f"sampling_params has no {name}{hint}", param=f"sampling_params.{name}")
    limit = fields.maybe_integer("max_new_tokens", low=0)
    draw = draw_of(
        fields,
        limit=128 if limit is None and "max_new_tokens" not in set(fields) else limit,
        min_new_tokens="min_new_tokens",
        seed="sampling_seed",
        rule=rule_of(fields),
    )
    # Not SGLang's: so many of the prompt's last tokens were drawn with this seed before, when an answer goes on.
    return replace(draw, sampling=replace(draw.sampling, drawn=fields.integer("sampling_drawn", 0, low=0)))


def draw_of(
    fields: Fields,
    *,
    limit: int | None,
    min_new_tokens: str,
    seed: str,
    rule: Rule | None,
    defaults: dict[str, float] | None = None,
    extra_stops: Iterable[str] = (),
) -> Draw:
    """A ``Draw`` from the names both APIs share. ``defaults`` are the model's own, where a body says nothing."""
    refuse_what_is_not_here(fields, _NOT_HERE)
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0} | (defaults or {})
    temperature = fields.within("temperature", given["temperature"], lambda x: 0 <= x <= MOST, "from 0 to a million")
    top_k = fields.integer("top_k", int(given["top_k"]))
    greedy = temperature < GREEDY or top_k == 1
    if not greedy and top_k != -1 and top_k < 1:
        raise fields.refuse("top_k", "-1 (off) or at least 1")
    least = fields.integer(min_new_tokens, 0, low=0)
    if least and rule is not None:
        # Where a rule has come to its end nothing but the end of the sequence may follow.
        raise Refusal(f"{min_new_tokens} and {rule.kind} cannot both be set.", param=min_new_tokens)
    if limit is not None and least > limit:
        raise fields.refuse(min_new_tokens, f"at most the {limit} tokens that may be written")
    ignore_eos = fields.flag("ignore_eos")
    stops = (*fields.texts("stop"), *extra_stops)
    sampling = Sampling(
        temperature=0.0 if greedy else temperature,
        top_p=fields.within("top_p", given["top_p"], lambda x: 0 < x <= 1, "above 0 and at most 1"),
        top_k=-1 if greedy else top_k,
        min_p=fields.within("min_p", given["min_p"], lambda x: 0 <= x <= 1, "from 0 to 1"),
        max_new_tokens=limit or 0,
        stop=tuple(stop for stop in stops if stop),
        # SGLang looks at no stop token at all when the end of the sequence is to be ignored.
        stop_token_ids=() if ignore_eos else fields.integers("stop_token_ids"),
        ignore_eos=ignore_eos,
    )
    return Draw(
        sampling=sampling,
        limit=limit,
        seed=fields.maybe_integer(seed),
        n=fields.integer("n", 1, low=1, high=MOST_ATTEMPTS),
        stop_regex=_patterns(fields),
        min_new_tokens=least,
        frequency_penalty=_penalty(fields, "frequency_penalty"),
        presence_penalty=_penalty(fields, "presence_penalty"),
        repetition_penalty=fields.within(
            "repetition_penalty", given["repetition_penalty"], lambda x: 0 < x <= 2, "above 0 and at most 2"
        ),
        logit_bias=_bias(fields),
        rule=rule,
        skip_special=fields.flag("skip_special_tokens", True),
        trim=not fields.flag("no_stop_trim"),
    )


def refuse_what_is_not_here(fields: Fields, names: Iterable[str]) -> None:
    """Fields of SGLang that would change the answer, and that this server does not have."""
    for name in names:
        if fields.raw(name):
            raise Refusal(f"{name} is not supported by this server; leave it out.", param=name)


def rule_of(fields: Fields) -> Rule | None:
    """The one rule of ``json_schema``, ``regex`` and ``ebnf``; an empty one is none."""
    rules: list[Rule] = []
    if fields.raw("json_schema"):
        rules.append(Rule(kind="json_schema", source=schema_text(fields.raw("json_schema"), fields)))
    if regex := fields.text("regex"):
        rules.append(Rule(kind="regex", source=regex))
    if ebnf := fields.text("ebnf"):
        rules.append(Rule(kind="ebnf", source=ebnf))
    if len(rules) > 1:
        raise Refusal(f"Only one of {' and '.join(rule.kind for rule in rules)} can be set.")
    return rules[0] if rules else None


def schema_text(value: Any, fields: Fields, name: str = "json_schema") -> str:
    """A JSON schema, given as an object or as its text, as text."""
    if isinstance(value, str):
        if value == ANY_JSON:
            return "{}"
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{name} is not valid JSON: {error}.", param=name) from error
    if not isinstance(value, dict | bool):
        raise fields.refuse(name, "a JSON schema: an object, or its text")
    return json.dumps(value)


def _penalty(fields: Fields, name: str) -> float:
    return fields.within(name, 0.0, lambda x: -2 <= x <= 2, "from -2 to 2")


def _patterns(fields: Fields) -> tuple[str, ...]:
    patterns = tuple(pattern for pattern in fields.texts("stop_regex") if pattern)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise Refusal(f"stop_regex {pattern!r} is not a pattern: {error}.", param="stop_regex") from error
    return patterns


def _bias(fields: Fields) -> dict[int, float]:
    given = fields.object("logit_bias")
    if given is None:
        return {}
    bias: dict[int, float] = {}
    for key in given:
        number = as_number(given.raw(key))
        token = as_integer(int(key)) if str(key).isascii() and str(key).isdigit() and len(key) < 19 else None
        if token is None or number is None or abs(number) > MOST:
            raise Refusal(
                'logit_bias must be an object of token ids and numbers up to a million, such as {"42": -100}.',
                param="logit_bias",
            )
        bias[token] = number
    return bias
