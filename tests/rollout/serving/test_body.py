"""Bodies are parsed strictly: a wrong type is refused in one sentence that names the field."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.serving.body import Count, Int, Number, OneOrMany, RequestBody, Texts, TokenLists, parse_body
from miles.rollout.serving.errors import RequestError, error_body
from miles.rollout.serving.http import has_valid_key, is_cross_origin, load_json
from miles.rollout.serving.openapi import EndpointDoc, build_openapi

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


class Inner(RequestBody):
    x: Int = 0


class Example(RequestBody):
    count: Count = 3
    number: Number = 0.0
    flag: bool = False
    text: str | None = None
    texts: Texts | None = None
    tokens: TokenLists | None = None
    flags: OneOrMany[bool | None] | None = None
    inner: Inner | None = None
    inners: list[Inner] | None = None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff", b'"\\ud800"', b'{"a": 1} x', b"[" * 10**5],
)
def test_what_is_not_json_is_refused(body: bytes):
    with pytest.raises(RequestError, match="not valid JSON") as refused:
        load_json(body)
    assert refused.value.malformed and refused.value.status == 400


def test_pairs_of_escapes_are_characters():
    assert load_json(b'"\\ud83d\\ude00"') == "\U0001f600"


def test_null_and_absent_are_the_default():
    assert parse_body(Example, {"count": None, "text": None}) == parse_body(Example, {})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"count": True}, "count is true, but must be an integer."),
        ({"count": 1.5}, "count is 1.5, but must be an integer."),
        ({"count": "1"}, 'count is "1", but must be an integer.'),
        ({"count": -1}, "count is -1, but must be at least 0."),
        ({"count": 2**63}, "count is 9223372036854775808, but must be an integer of 64 bits."),
        ({"flag": 1}, "flag is 1, but must be true or false."),
        ({"number": []}, "number is an empty list, but must be a number."),
        ({"number": 1e999}, "number is Infinity, but must be a number."),
        ({"text": {}}, "text is an object, but must be a string."),
        ({"texts": [1]}, "texts[0] is 1, but must be a string."),
        ({"tokens": [True]}, "tokens[0] is true, but must be an integer."),
        ({"tokens": [[1], [2.5]]}, "tokens[1][0] is 2.5, but must be an integer."),
        ({"inner": 3}, "inner is 3, but must be an object."),
        ({"inners": [{"x": "y"}]}, 'inners[0].x is "y", but must be an integer.'),
        ({"flag": "a" * 99}, f'flag is "{"a" * 36}..., but must be true or false.'),
    ],
)
def test_a_wrong_value_is_named(body: dict[str, Any], sentence: str):
    with pytest.raises(RequestError) as refused:
        parse_body(Example, body)
    assert str(refused.value) == sentence


def test_whole_numbers_may_be_written_as_floats():
    assert parse_body(Example, {"count": 3.0}).count == 3


@given(body=st.dictionaries(st.sampled_from(sorted(Example.model_fields)), JSON))
def test_any_body_is_parsed_or_refused_in_one_sentence(body: dict[str, Any]):
    try:
        parse_body(Example, body)
    except RequestError as refused:
        assert str(refused).endswith(".") and "\n" not in str(refused)


def test_each_api_has_its_own_error_body():
    wrong, odd = RequestError("No.", malformed=True), RequestError("No.", param="top_p", code="why")
    flat = {"object": "error", "message": "No.", "type": "Bad Request", "param": None, "code": 400}
    assert error_body(wrong, "sglang") == flat
    assert error_body(odd, "sglang") == {"error": {"message": "No."}}
    both = error_body(odd, "sglang_openai")
    assert (both["object"], both["message"], both["type"], both["code"]) == ("error", "No.", "BadRequestError", 400)
    assert both["error"] == {"message": "No.", "type": "invalid_request_error", "param": "top_p", "code": 400}
    inner = {"message": "No.", "type": "invalid_request_error", "param": "top_p", "code": "why"}
    assert error_body(odd, "openai") == {"error": inner}
    overloaded = error_body(RequestError("Later.", status=503), "anthropic")
    assert overloaded == {"type": "error", "error": {"type": "overloaded_error", "message": "Later."}}


def test_pages_of_other_sites_and_names_are_foreign():
    assert not is_cross_origin({"Host": "127.0.0.1:8000"}) and not is_cross_origin({"Host": "localhost"})
    assert is_cross_origin({"Host": "127.0.0.1", "Origin": "http://evil.example"})
    assert is_cross_origin({"Host": "evil.example"}) and is_cross_origin({})


def test_a_key_may_be_a_bearer_token_or_anthropics_header():
    assert has_valid_key({"Authorization": "Bearer k"}, "k") and has_valid_key({"x-api-key": "k"}, "k")
    assert not has_valid_key({}, "k") and not has_valid_key({"Authorization": "Basic k"}, "k")


def test_the_openapi_document_follows_from_the_bodies():
    docs = [EndpointDoc(path="/x/{id}", methods=("post",), summary="Do x.", body=Example, query={"q": {}})]
    document = build_openapi("Title", "1", docs, requires_key=True)
    operation = document["paths"]["/x/{id}"]["post"]
    assert operation["operationId"] == "post_x_id" and len(operation["parameters"]) == 2
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Example")
    assert {"type": "null"} in document["components"]["schemas"]["Example"]["properties"]["count"]["anyOf"]
    assert document["security"] == [{"key": []}]
