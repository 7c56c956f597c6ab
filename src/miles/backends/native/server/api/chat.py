"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: their bodies as parsed requests and response options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from miles.backends.native.server.api.request_types import (
    MAX_SAMPLES_PER_PROMPT,
    MAX_TOP_LOGPROBS,
    EngineRequestFields,
    EngineSamplingFields,
    GrammarRule,
    ParsedRequest,
    PromptInput,
    assign_rids,
    build_grammar,
    build_request,
    check_num_requests,
    dump_schema,
    split_token_prompts,
)
from miles.core.errors import DataError, MilesError
from miles.core.media import Images
from miles.core.protocols import ImageTokenizer
from miles.models.tokenizer import HfTokenizer
from miles.rollout.images import encode_chat, store_images
from miles.rollout.serving.body import Count, Int, PositiveInt, parse_body
from miles.rollout.serving.errors import RequestError, SessionError
from miles.rollout.serving.messages import TEXT_TYPES, Tool, ToolSchemas, extract_media, extract_text, get_tool_schemas
from miles.rollout.serving.openai_bodies import (
    ChatBody,
    MessageBody,
    ResponseFormat,
    StreamOptions,
    join_text_parts,
    parse_tool_choice,
)
from miles.rollout.serving.output_parser import OutputParser
from miles.rollout.serving.tool_parsers import (
    JSON_LIST_PARSER,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ReasoningParser,
    ToolCallParser,
    build_tool_list_schema,
    detect_tool_parser,
)

UNSUPPORTED = (
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "structural_tag",
    "custom_params",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What an OpenAI response contains. ``echoes`` are the prompt texts to repeat, one per request."""

    model: str
    n: int
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    output_parser: OutputParser = field(default_factory=OutputParser)
    echoes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter:
    """What chats are rendered and parsed with; ``defaults`` are the model's own sampling parameters.

    A rendered chat of more than ``max_text_length`` characters is not tokenized.
    """

    tokenizer: HfTokenizer
    defaults: Mapping[str, float]
    tool_parser: ToolCallParser | None
    reasoning_parser: ReasoningParser | None
    max_text_length: int = sys.maxsize


def build_chat_formatter(
    tokenizer: HfTokenizer,
    defaults: Mapping[str, float],
    *,
    tool_call_parser: str,
    reasoning_parser: str,
    max_text_length: int = sys.maxsize,
) -> ChatFormatter:
    """``auto`` detects the tool-call parser from the chat template."""
    is_auto = tool_call_parser == "auto"
    parser = detect_tool_parser(tokenizer.chat_template) if is_auto else TOOL_CALL_PARSERS.get(tool_call_parser)
    return ChatFormatter(
        tokenizer=tokenizer,
        defaults=defaults,
        tool_parser=parser,
        reasoning_parser=REASONING_PARSERS.get(reasoning_parser),
        max_text_length=max_text_length,
    )


class EngineChatBody(ChatBody, EngineSamplingFields, EngineRequestFields):
    """``/v1/chat/completions`` of the engine, with SGLang's additional fields."""

    unsupported: ClassVar[tuple[str, ...]] = UNSUPPORTED
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_PROMPT)] = 1
    min_tokens: Count = 0
    lora_path: str | None = None
    input_ids: list[int] | None = None
    continue_final_message: bool = False
    separate_reasoning: bool = True
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False


class CompletionBody(EngineSamplingFields, EngineRequestFields):
    """``/v1/completions``."""

    unsupported: ClassVar[tuple[str, ...]] = (*UNSUPPORTED, "suffix")
    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                ]
            }
        ),
    ]
    model: str = "default"
    lora_path: str | None = None
    max_tokens: PositiveInt = 16
    min_tokens: Count = 0
    seed: Int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Int | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


def parse_chat_body(
    value: Any, formatter: ChatFormatter, new_rid: Callable[[], str]
) -> tuple[list[ParsedRequest], ResponseOptions, bool]:
    """The requests of a chat body, the options of its response, and whether it streams."""
    body = parse_body(EngineChatBody, value)
    choice, name = parse_tool_choice(body.tool_choice, list(body.tools))
    tools = [tool for tool in body.tools if name in (None, tool["function"]["name"])]
    if not tools:
        choice = "none"
    schemas = get_tool_schemas(tools)
    prompt, images = _build_prompt(body, formatter, [] if choice == "none" else tools)
    request = build_request(
        body,
        max_new_tokens=body.max_new_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        grammar=_build_chat_grammar(body, choice, schemas),
        defaults=formatter.defaults,
    )
    request = replace(
        request,
        prompt=prompt,
        images=images,
        priority=body.priority,
        # The markers of tool calls may be special tokens.
        skip_special_tokens=request.skip_special_tokens and choice == "none",
        return_logprob=body.logprobs,
        top_logprobs_num=body.top_logprobs if body.logprobs else 0,
        lora=body.lora_path,
        return_text_in_logprobs=True,
        routed_experts_start_len=body.experts_start,
    )
    rids = assign_rids(body.rid, 1, single=True, n=body.n, new_rid=new_rid)
    requests = [replace(request, rid=rid, sample_index=index) for index, rid in enumerate(rids)]
    options = ResponseOptions(
        model=body.model,
        n=body.n,
        include_usage=body.stream_options.include_usage,
        continuous_usage=body.stream_options.continuous_usage_stats,
        logprobs=body.logprobs,
        return_token_ids=body.return_token_ids,
        return_prompt_token_ids=body.return_token_ids or body.return_prompt_token_ids,
        return_meta_info=body.return_meta_info,
        output_parser=_build_output_parser(body, formatter, choice, schemas, prompt),
    )
    return requests, options, body.stream


def has_media(value: Any) -> bool:
    """Whether the body of a chat may hold images, which are decoded on a thread."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        return False
    return next(extract_media([m for m in messages if isinstance(m, dict) and _has_parts(m)]), None) is not None


def _has_parts(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)


def parse_completion_body(
    value: Any, decode: Callable[[tuple[int, ...]], str], new_rid: Callable[[], str]
) -> tuple[list[ParsedRequest], ResponseOptions, bool]:
    """The requests of a completions body, the options of its response, and whether it streams.

    ``decode`` gives the text of token prompts where they are echoed.
    """
    body = parse_body(CompletionBody, value)
    prompts, single = _split_completion_prompts(body.prompt)
    n = body.n
    if body.best_of not in (None, n):
        raise RequestError(f"best_of is {body.best_of}, but this server returns all samples: leave it out.")
    check_num_requests(len(prompts) * n)
    request = build_request(
        body,
        max_new_tokens=body.max_tokens,
        min_new_tokens=body.min_tokens,
        seed=body.seed,
        grammar=build_response_grammar(body, body.response_format),
    )
    request = replace(
        request,
        priority=body.priority,
        return_logprob=body.logprobs is not None,
        logprob_start_len=0 if body.echo and body.logprobs else None,
        top_logprobs_num=body.logprobs or 0,
        lora=body.lora_path,
        return_text_in_logprobs=True,
        routed_experts_start_len=body.experts_start,
    )
    rids = assign_rids(body.rid, len(prompts), single=single, n=n, new_rid=new_rid)
    requests = [
        replace(request, prompt=prompt, rid=rids[i * n + sample], sample_index=sample)
        for i, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts] if body.echo else []
    options = ResponseOptions(
        model=body.model,
        n=n,
        include_usage=body.stream_options.include_usage,
        continuous_usage=body.stream_options.continuous_usage_stats,
        logprobs=body.logprobs is not None,
        return_token_ids=body.return_token_ids,
        return_prompt_token_ids=body.return_token_ids,
        echoes=tuple(text for text in texts for _ in range(n)),
    )
    return requests, options, body.stream


def _split_completion_prompts(value: Any) -> tuple[list[PromptInput], bool]:
    if value == "" or (isinstance(value, list) and "" in value):
        raise RequestError("prompt is empty.", param="prompt")
    if isinstance(value, str):
        return [value], True
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return list(value), False
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if not all(isinstance(row, list) and set(map(type, row)) <= {int} for row in rows):
        raise RequestError(
            "prompt must be a string, a list of strings, a list of tokens or a list of such lists.",
            param="prompt",
            malformed=True,
        )
    return split_token_prompts(value, "prompt")


# -- grammars and parsers -------------------------------------------------------------------


def build_response_grammar(fields: EngineSamplingFields, response_format: ResponseFormat | None) -> GrammarRule | None:
    """The grammar of ``response_format``, or of one of the fields that set a grammar directly."""
    direct = build_grammar(fields)
    if response_format is None or response_format.type == "text":
        return direct
    if direct is not None:
        raise RequestError(f"response_format and {direct.kind} cannot both be set.", param="response_format")
    if response_format.type == "json_object":
        return GrammarRule(kind="json_schema", source='{"type": "object"}')
    if response_format.type == "regex":
        if response_format.regex is None:
            raise RequestError("response_format.regex is missing.", param="response_format")
        return GrammarRule(kind="regex", source=response_format.regex)
    wrapper = response_format.json_schema
    schema = response_format.bare_schema if wrapper is None else wrapper.json_schema
    if schema is None:
        raise RequestError("response_format.json_schema has no schema.", param="response_format")
    return GrammarRule(kind="json_schema", source=dump_schema(schema, "response_format.json_schema.schema"))


def _build_chat_grammar(body: EngineChatBody, choice: str, schemas: ToolSchemas) -> GrammarRule | None:
    grammar = build_response_grammar(body, body.response_format)
    if choice != "required":
        return grammar
    if grammar is not None:
        raise RequestError("A required tool call and a response format cannot both be set.")
    schema = build_tool_list_schema(schemas, parallel=body.parallel_tool_calls)
    return GrammarRule(kind="json_schema", source=json.dumps(schema))


def _build_output_parser(
    body: EngineChatBody, formatter: ChatFormatter, choice: str, schemas: ToolSchemas, prompt: tuple[int, ...]
) -> OutputParser:
    tool_parser = {"required": JSON_LIST_PARSER, "auto": formatter.tool_parser}.get(choice)
    reasoning = formatter.reasoning_parser if body.separate_reasoning and choice != "required" else None
    tail = "" if reasoning is None else formatter.tokenizer.decode(prompt[-8:]).rstrip()
    return OutputParser(
        tool_parser=tool_parser,
        tools=None if tool_parser is None else schemas,
        reasoning_parser=reasoning,
        in_reasoning=reasoning is not None and tail.endswith(reasoning.start),
    )


# -- the prompt -----------------------------------------------------------------------------


def _build_prompt(
    body: EngineChatBody, formatter: ChatFormatter, tools: Sequence[Tool]
) -> tuple[tuple[int, ...], Images]:
    if body.input_ids is not None:
        return split_token_prompts(body.input_ids, "input_ids")[0][0], ()  # pyright: ignore[reportReturnType]
    messages = _build_messages(body.messages, formatter.tokenizer)
    template = body.effort_kwargs()
    if template:
        template["thinking"] = template["enable_thinking"]
    template |= body.template_kwargs()
    tokenizer, prefix = formatter.tokenizer, ""
    if body.continue_final_message and messages[-1]["role"] == "assistant":
        prefix = extract_text(messages.pop())
    try:
        text = tokenizer.render_chat_text(messages, add_generation_prompt=True, tools=list(tools) or None, **template)
    except MilesError as error:
        raise RequestError(str(error)) from error
    except Exception as error:  # a template is a program of the model's author and may fail in any way
        raise RequestError(f"The chat template cannot render this conversation: {error}.") from error
    length = len(text) + len(prefix)
    if length > formatter.max_text_length:
        raise RequestError(f"The conversation has {length} characters, far more than the context has room for.")
    try:
        tokens, images = encode_chat(tokenizer, text, messages)
    except DataError as error:
        raise RequestError(str(error), param="messages") from error
    return (*tokens, *(tokenizer.encode(prefix) if prefix else ())), images


def _build_messages(bodies: Sequence[MessageBody], tokenizer: HfTokenizer) -> list[dict[str, Any]]:
    """Messages as chat templates expect them, with their images in the store of a tokenizer that encodes images."""
    reads_images = isinstance(tokenizer, ImageTokenizer)
    messages = [_build_message(message, f"messages[{i}]", reads_images) for i, message in enumerate(bodies)]
    if not reads_images:
        return messages
    try:
        return [dict(message) for message in store_images(messages, tokenizer.media)]
    except SessionError as error:
        raise RequestError(str(error), param="messages") from error


def _build_message(body: MessageBody, path: str, reads_images: bool) -> dict[str, Any]:
    """A message as chat templates expect it: text or parts as content, and call arguments as objects."""
    content = join_text_parts(body.content, " ")
    if isinstance(content, list) and not reads_images:
        kind = next(part["type"] for part in content if part["type"] not in TEXT_TYPES)
        problem = f"{path}.content has a part of type {kind!r}, but this model reads text only."
        raise RequestError(problem, param=f"{path}.content")
    if content is None and body.role == "user":
        raise RequestError(f"{path}.content is missing.", param=f"{path}.content", malformed=True)
    message: dict[str, Any] = {"role": body.role, "content": content or ""}
    fields = {"name": body.name, "tool_call_id": body.tool_call_id, "reasoning_content": body.reasoning_content}
    message |= {name: value for name, value in fields.items() if value is not None}
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(body.tool_calls):
        arguments = _parse_arguments(call.function.arguments, f"{path}.tool_calls[{index}].function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        calls.append(({} if call.id is None else {"id": call.id}) | {"type": "function", "function": function})
    return message | ({"tool_calls": calls} if calls else {})


def _parse_arguments(arguments: Any, path: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is not valid JSON: {error}.", param=path) from error
    if arguments is not None and not isinstance(arguments, dict):
        raise RequestError(f"{path} must be a JSON object, or its text.", param=path)
    return arguments or {}
