"""JSON-schema grader. Runs in a worker process: a pattern in a schema may never finish matching."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from miles.rollout.reward.types import BadLabel, Metadata

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """``score``: the response, or the fenced block that is all of it, is JSON that fits; ``parsed``: it is JSON at all.

    The schema is ``metadata["json_schema"]``, or the label as JSON.
    """
    validator = _validator(_schema(label, metadata))
    fenced = _FENCED.fullmatch(reply)
    try:
        document = json.loads(fenced[1] if fenced else reply, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return {"score": 0.0, "parsed": 0.0}
    try:
        return {"score": float(validator.is_valid(document)), "parsed": 1.0}
    except Unresolvable as error:
        raise BadLabel(f"the schema refers to what is not in it ({error})") from error


def _schema(label: str, metadata: Metadata) -> Any:
    if "json_schema" in metadata:
        schema = metadata["json_schema"]
        return schema if not isinstance(schema, str) else _parse_schema(schema)
    if not label.strip():
        raise BadLabel("there is no schema in metadata['json_schema'] and no label")
    return _parse_schema(label)


def _parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadLabel(f"the schema is not JSON ({error})") from error


def _validator(schema: Any) -> Validator:
    if not isinstance(schema, dict):
        raise BadLabel(f"a schema is a JSON object, and this is a {type(schema).__name__}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise BadLabel(f"the schema is not one ({error.message})") from error
    # With an empty registry, references to external addresses fail instead of being fetched.
    return kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
