"""The body of OpenAI's ``/v1/chat/completions``, read into wishes and how their replies are to be told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from miles.backends.native.server.drawing import draw_of, refuse_what_is_not_here, rule_of, schema_text
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.generate import Errand, rids_of, token_prompts
from miles.backends.native.server.messages import (
    read_choice,
    read_messages,
    read_template,
    read_tools,
    render,
)
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.speech import PLAIN, Manner
from miles.backends.native.server.tools import FORCED, FORMATS, Format, Tools, forced_schema, format_in
from miles.backends.native.server.wish import Draw, Rule, Wish
from miles.models.tokenizer import HubTokenizer

NOT_HERE = ("lora_path", "session_params", "custom_logit_processor", "return_hidden_states", "return_sampling_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How an OpenAI reply is told. ``prompts``: what each wish's prompt is echoed as, where it is."""

    model: str
    n: int
    usage: bool = False
    running_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    prompt_ids: bool = False
    meta: bool = False
    manner: Manner = PLAIN
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """What a chat is read with: the model's tokenizer, its own sampling defaults, and how its replies are marked."""

    tokenizer: HubTokenizer
    defaults: Mapping[str, float]
    format: Format | None
    thinking: bool


def speaker_of(
    tokenizer: HubTokenizer, defaults: Mapping[str, float], *, tool_call_parser: str, reasoning_parser: str
) -> Speaker:
    """``auto`` finds the format of tool calls in the chat template."""
    found = format_in(tokenizer.chat_template) if tool_call_parser == "auto" else FORMATS.get(tool_call_parser)
    return Speaker(tokenizer=tokenizer, defaults=defaults, format=found, thinking=reasoning_parser == "think")


def read_chat(body: Any, speaker: Speaker, new_rid: Callable[[], str]) -> tuple[Errand, Told]:
    """What a chat body asks for."""
    fields = Fields(body)
    refuse_what_is_not_here(fields, NOT_HERE)
    messages = read_messages(fields)
    given, offered = read_tools(fields)
    choice, tools = read_choice(fields, offered)
    prompt = _prompt(fields, speaker, messages, [] if choice == "none" else _chosen(given, tools))
    draw = _draw(fields, speaker, choice, tools)
    logprobs = fields.flag("logprobs")
    rids = rids_of(fields, 1, single=True, attempts=draw.n, new_rid=new_rid)
    wishes = tuple(
        Wish(
            prompt=prompt,
            draw=draw,
            rid=rid,
            attempt=i,
            priority=fields.integer("priority", 0),
            logprobs=logprobs,
            tops=fields.integer("top_logprobs", 0, low=0) if logprobs else 0,
            words=True,
            experts_from=fields.integer("routed_experts_start_len", 0, low=0)
            if fields.flag("return_routed_experts")
            else None,
        )
        for i, rid in enumerate(rids)
    )
    token_ids = fields.flag("return_token_ids")
    told = replace(
        told_of(fields, draw.n),
        logprobs=logprobs,
        token_ids=token_ids,
        prompt_ids=token_ids or fields.flag("return_prompt_token_ids"),
        meta=fields.flag("return_meta_info"),
        manner=_manner(fields, speaker, choice, tools, prompt),
    )
    return Errand(wishes=wishes, single=False, stream=fields.flag("stream")), told


def told_of(fields: Fields, n: int) -> Told:
    """What both OpenAI endpoints say of how to tell."""
    options = fields.object("stream_options")
    return Told(
        model=fields.text("model") or "default",
        n=n,
        usage=options is not None and options.flag("include_usage"),
        running_usage=options is not None and options.flag("continuous_usage_stats"),
    )


def format_rule(fields: Fields) -> Rule | None:
    """The rule of ``response_format``, or of one of the fields that name a rule directly."""
    direct = rule_of(fields)
    given = fields.object("response_format")
    kind = None if given is None else given.needed_text("type")
    if given is None or kind == "text":
        return direct
    if direct is not None:
        raise Refusal(f"response_format and {direct.kind} cannot both be set.", param="response_format")
    if kind == "json_object":
        return Rule(kind="json_schema", source='{"type": "object"}')
    if kind == "regex":
        return Rule(kind="regex", source=given.needed_text("regex"))
    if kind != "json_schema":
        raise given.refuse("type", "text, json_object, json_schema or regex")
    inner = given.object("json_schema")
    schema = given.raw("schema") if inner is None else inner.raw("schema")
    if schema is None:
        raise Refusal("response_format.json_schema has no schema.", param="response_format")
    return Rule(kind="json_schema", source=schema_text(schema, inner or given, "schema"))


def _prompt(
    fields: Fields, speaker: Speaker, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> tuple[int, ...]:
    if "input_ids" in fields:
        (prompt, *rest), _ = token_prompts(fields, "input_ids")
        if rest or isinstance(prompt, str):
            raise fields.refuse("input_ids", "one list of integers")
        return prompt
    template, go_on = read_template(fields), fields.flag("continue_final_message")
    return render(speaker.tokenizer, messages, tools=tools, template=template, go_on=go_on)


def _chosen(given: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    return [tool for tool in given if tool["function"]["name"] in tools]


def _draw(fields: Fields, speaker: Speaker, choice: str, tools: Tools) -> Draw:
    limit = fields.maybe_integer("max_completion_tokens", low=0)
    if limit is None:
        limit = fields.maybe_integer("max_tokens", low=0)
    rule = format_rule(fields)
    if choice == "required":
        if rule is not None:
            raise Refusal("A tool that must be called and a format of the reply cannot both be had.")
        schema = forced_schema(tools, parallel=fields.flag("parallel_tool_calls", True))
        rule = Rule(kind="json_schema", source=json.dumps(schema))
    draw = draw_of(
        fields, limit=limit, min_new_tokens="min_tokens", seed="seed", rule=rule, defaults=dict(speaker.defaults)
    )
    # Marks of tool calls may be special tokens.
    return replace(draw, skip_special=False) if choice != "none" else draw


def _manner(fields: Fields, speaker: Speaker, choice: str, tools: Tools, prompt: tuple[int, ...]) -> Manner:
    format = {"required": FORCED, "auto": speaker.format}.get(choice)
    thinking = speaker.thinking and fields.flag("separate_reasoning", True) and choice != "required"
    opened = thinking and speaker.tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    return Manner(format=format, tools=None if format is None else tools, thinking=thinking, opened=opened)
