"""The ``json_schema`` reward: JSON that fits."""

import json

import pytest
from tests.rollout.reward.reward_case import reward, value

from miles.core.errors import DataError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CASES = [
    ('{"name": "Ada"}', 1.0, 1.0),
    ('```json\n{"name": "Ada", "age": 36}\n```', 1.0, 1.0),
    ('```\n{"name": "Ada"}\n```\n', 1.0, 1.0),
    ('{"name": "ada"}', 0.0, 1.0),
    ('{"name": "Ada", "age": -1}', 0.0, 1.0),
    ('{"name": "Ada", "age": 3.5}', 0.0, 1.0),
    ('{"name": "Ada", "job": "x"}', 0.0, 1.0),
    ("{}", 0.0, 1.0),
    ("[]", 0.0, 1.0),
    ('Here: {"name": "Ada"}', 0.0, 0.0),
    ('{"name": "Ada"} or {"name": "Bob"}', 0.0, 0.0),
    ('{"name": NaN}', 0.0, 0.0),
    ('{"name": "Ada",}', 0.0, 0.0),
    ("", 0.0, 0.0),
    ("[" * 100_000, 0.0, 0.0),
]


@pytest.mark.parametrize(("reply", "score", "parsed"), CASES)
def test_json_that_fits_earns_one(reply, score, parsed, means):
    assert reward("json_schema", reply, json.dumps(PERSON), means=means).parts == {"score": score, "parsed": parsed}
    assert value("json_schema", reply, None, metadata={"json_schema": PERSON}, means=means) == score


@pytest.mark.parametrize(
    ("label", "metadata", "complaint"),
    [
        (None, {}, "there is no schema"),
        ("{", {}, "the schema is not JSON"),
        ("[1]", {}, "a schema is a JSON object, and this is a list"),
        ('{"type": "strange"}', {}, "the schema is not one"),
        (None, {"json_schema": '{"type": 3}'}, "the schema is not one"),
        ('{"$ref": "http://127.0.0.1:9/schema.json"}', {}, "refers to what is not in it"),
    ],
)
def test_a_schema_that_is_none_is_the_data_s_fault(label, metadata, complaint, means):
    with pytest.raises(DataError, match=complaint):
        value("json_schema", "{}", label, metadata=metadata, means=means)
