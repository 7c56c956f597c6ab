"""Bodies of OpenAI's chat API that both servers accept: messages, tools, tool choice and response format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from miles.rollout.serving.body import Count, Int, PositiveInt, RequestBody
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.messages import TEXT_TYPES, Tool
from miles.rollout.serving.sampling_params import SamplingFields

TEMPLATE_ARGUMENTS = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "kwargs",
        "tokenizer_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    )
)
"""Arguments of a chat template that a client may not set."""


def _check_parts(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError("must be a list of objects that each have a type")
        if part["type"] in TEXT_TYPES and not isinstance(part.get("text"), str):
            raise ValueError("has a text part without text")
    return value


Content = Annotated[
    Any,
    AfterValidator(_check_parts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]
"""A string or a list of parts; parts that are not text are kept unchanged."""


class FunctionCallBody(RequestBody):
    name: str
    arguments: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None


class ToolCallBody(RequestBody):
    id: str | None = None
    function: FunctionCallBody


class MessageBody(RequestBody):
    """One message of a conversation."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
    ]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] = Field(default_factory=list)


def join_text_parts(content: str | Sequence[Mapping[str, Any]] | None, separator: str = "") -> Any:
    """Content as text; content with media stays a list of parts."""
    if content is None or isinstance(content, str) or any(part["type"] not in TEXT_TYPES for part in content):
        return content
    return separator.join(part["text"] for part in content)


def check_function(function: Any) -> None:
    """The name and the JSON schema of a function tool."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be an object of type function, with a function that has a name")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError("has parameters that are not a JSON schema")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "function"):
        raise ValueError("must be an object of type function, with a function that has a name")
    check_function(tool.get("function"))
    return tool


ToolBody = Annotated[
    dict[str, Any],
    AfterValidator(_check_tool),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
                    "required": ["name"],
                },
            },
            "required": ["function"],
        }
    ),
]
"""A tool exactly as it was sent, since chat templates render its fields in order."""
ToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})]


JsonSchema = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "boolean"}]})]
"""A JSON schema as an object or as its text; checked where it is compiled."""


class JsonSchemaFormat(RequestBody):
    name: str | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")] = None


class ResponseFormat(RequestBody):
    """``response_format``; SGLang also accepts a regular expression, and a schema without its wrapper."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchemaFormat | None = None
    bare_schema: Annotated[JsonSchema, Field(alias="schema")] = None
    regex: str | None = None


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TemplateFields(RequestBody):
    """What a client passes to the chat template."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def template_kwargs(self) -> dict[str, Any]:
        for name in self.chat_template_kwargs:
            if name in TEMPLATE_ARGUMENTS:
                raise RequestError(f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs")
        return dict(self.chat_template_kwargs)


class ChatBody(SamplingFields, TemplateFields):
    """``/v1/chat/completions``."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    model: str = "default"
    tools: list[ToolBody] = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[Any, WithJsonSchema({"type": ["string", "number"]})] = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: PositiveInt = 1
    seed: Int | None = None
    logprobs: bool = False
    top_logprobs: Count = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def effort_kwargs(self) -> dict[str, Any]:
        """The template arguments of ``reasoning_effort``."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        if isinstance(effort, bool) or not isinstance(effort, str | int | float):
            raise RequestError("reasoning_effort must be a word or a number.", param="reasoning_effort")
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def parse_tool_choice(choice: Any, tools: list[Tool]) -> tuple[Literal["none", "auto", "required"], str | None]:
    """OpenAI's ``tool_choice``, and the function it names; a named function is required."""
    if choice in (None, "auto", "none"):
        return choice or "auto", None
    if choice == "required":
        if not tools:
            raise RequestError("tool_choice is required, but there are no tools.", param="tool_choice")
        return "required", None
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be none, auto, required, or an object that names a function.",
            param="tool_choice",
            malformed=True,
        )
    if name not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"tool_choice names {name!r}, but there is no such tool.", param="tool_choice")
    return "required", name
