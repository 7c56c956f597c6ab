"""Request bodies as pydantic models: strict JSON types, null means absent, and errors as one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from miles.rollout.serving.errors import RequestError

MAX_INT = 2**63 - 1
T = TypeVar("T")


def _accept_whole_float(value: Any) -> Any:
    """JSON does not tell 3 from 3.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INT:
        return int(value)
    return value


Int = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT), BeforeValidator(_accept_whole_float)]
Count = Annotated[int, Field(ge=0, le=MAX_INT), BeforeValidator(_accept_whole_float)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT), BeforeValidator(_accept_whole_float)]
Number = Annotated[float, Field(ge=-1e308, le=1e308)]


def _is_batch(value: Any) -> str:
    return "<batch>" if isinstance(value, list) else "<one>"


def _is_token_batch(value: Any) -> str:
    return "<batch>" if isinstance(value, list) and value and isinstance(value[0], list) else "<one>"


OneOrMany = Annotated[Annotated[T, Tag("<one>")] | Annotated[list[T], Tag("<batch>")], Discriminator(_is_batch)]
"""A value for all prompts of a request, or a list with one for each."""
TokenLists = Annotated[
    Annotated[list[int], Tag("<one>")] | Annotated[list[list[int]], Tag("<batch>")], Discriminator(_is_token_batch)
]
"""One list of token ids, or a list of such lists."""
Texts = OneOrMany[str]


class RequestBody(BaseModel):
    """A JSON object. Unknown fields are ignored, as the APIs do; a null field is the same as an absent one.

    ``unsupported`` fields would change the reply, so they are refused; ``nullable`` ones keep their null. A body with
    a ``closed_name`` refuses unknown fields, under that name.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    unsupported: ClassVar[tuple[str, ...]] = ()
    nullable: ClassVar[tuple[str, ...]] = ()
    closed_name: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in cls.unsupported:
            if value.get(name):
                raise RequestError(f"{name} is not supported by this server; leave it out.", param=name)
        unknown = [] if cls.closed_name is None else [name for name in value if name not in cls.model_fields]
        if unknown:
            close = get_close_matches(unknown[0], cls.model_fields, n=1)
            hint = f"you may mean {close[0]}." if close else f"it may have {', '.join(cls.model_fields)}."
            raise RequestError(f"{cls.closed_name} has no {unknown[0]}; {hint}", param=unknown[0])
        return {name: field for name, field in value.items() if field is not None or name in cls.nullable}


Body = TypeVar("Body", bound=RequestBody)


def parse_body(model: type[Body], value: Any, *, path: str = "") -> Body:
    """Validate a parsed JSON value; ``path`` is its place in the request, for error messages."""
    if not isinstance(value, dict):
        message = f"{path or 'The body'} is {describe_value(value)}, but must be an object."
        raise RequestError(message, param=path or None, malformed=True)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _convert_error(error, path) from error


def require_text(value: str | None, path: str) -> str:
    """A field that only some kinds of an object need."""
    if value is None:
        raise RequestError(f"{path} is missing.", param=path, malformed=True)
    return value


def as_list(value: T | list[T] | None) -> list[T]:
    """A field that may be one value or a list of values; absent is empty."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def describe_value(value: Any) -> str:
    """A JSON value as an error message names it."""
    if value is None:
        return "missing"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


_EXPECTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least {}"),
    "greater_than": ("gt", "above {}"),
    "less_than_equal": ("le", "at most {}"),
    "less_than": ("lt", "below {}"),
}


def _convert_error(error: ValidationError, prefix: str) -> RequestError:
    """The first problem as one sentence. SGLang reports wrong types outside ``sampling_params`` in another body."""
    detail = error.errors(include_url=False)[0]
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    path = _format_path(prefix, detail["loc"])
    malformed = not path.startswith(("sampling_params.", "sampling_params["))
    if kind == "missing":
        return RequestError(f"{path} is missing.", param=path, malformed=malformed)
    if kind == "too_short":
        return RequestError(f"{path} must have at least {context['min_length']} item.", param=path)
    if kind == "value_error":
        return RequestError(f"{path} {context['error']}.", param=path)
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        bound = context[name]
        expected = "an integer of 64 bits" if abs(bound) >= MAX_INT else phrase.format(f"{bound:g}")
        return RequestError(f"{path} is {describe_value(value)}, but must be {expected}.", param=path)
    expected = f"one of {context['expected']}" if kind == "literal_error" else _EXPECTED.get(kind)
    if expected is None:
        return RequestError(f"{path}: {detail['msg']}.", param=path, malformed=malformed)
    return RequestError(f"{path} is {describe_value(value)}, but must be {expected}.", param=path, malformed=malformed)


def _format_path(prefix: str, location: Sequence[int | str]) -> str:
    path = prefix
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):  # the tags of OneOrMany
            path += f".{part}" if path else part
    return path
