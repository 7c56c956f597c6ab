"""Bodies are read strictly: wrong kinds are refused in one sentence that names the field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.native.server.fields import Fields, read_json
from miles.backends.native.server.refusal import Refusal, native_body, openai_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{'a': 1}", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff", b'"\\ud800"', b'{"a": 1} x', b"[" * 10**5],
)
def test_what_is_not_json_is_refused(body: bytes):
    with pytest.raises(Refusal, match="not valid JSON") as refused:
        read_json(body)
    assert refused.value.malformed and refused.value.status == 400


def test_pairs_of_escapes_are_characters():
    assert read_json(b'"\\ud83d\\ude00"') == "\U0001f600"


def test_null_and_missing_are_the_default():
    fields = Fields({"a": None})
    assert fields.integer("a", 3) == fields.integer("b", 3) == 3
    assert fields.text("a") is None and fields.flag("a", True) and fields.texts("a") == ()


@pytest.mark.parametrize(
    ("value", "read", "says"),
    [
        (True, lambda f: f.integer("x", 0), "x is true, but must be an integer."),
        (1.5, lambda f: f.integer("x", 0), "x is 1.5, but must be an integer."),
        ("1", lambda f: f.integer("x", 0), 'x is "1", but must be an integer.'),
        (0, lambda f: f.integer("x", 1, low=1), "x is 0, but must be at least 1."),
        (2**63, lambda f: f.integer("x", 1), "x is 9223372036854775808, but must be an integer of 64 bits."),
        (1, lambda f: f.flag("x"), "x is 1, but must be true or false."),
        ([], lambda f: f.number("x", 0), "x is an empty list, but must be a number."),
        (1e999, lambda f: f.number("x", 0), "x is Infinity, but must be a number."),
        ({}, lambda f: f.text("x"), "x is an object, but must be a string."),
        ([1], lambda f: f.texts("x"), "x is a list, but must be a string or a list of strings."),
        ([True], lambda f: f.integers("x"), "x is a list, but must be a list of integers."),
        ("a" * 99, lambda f: f.flag("x"), f'x is "{"a" * 36}..., but must be true or false.'),
    ],
)
def test_a_wrong_kind_is_named(value: object, read, says: str):
    with pytest.raises(Refusal) as refused:
        read(Fields({"x": value}))
    assert str(refused.value) == says


def test_whole_numbers_may_be_written_as_floats():
    assert Fields({"x": 3.0}).integer("x", 0) == 3


@given(value=JSON)
def test_reading_any_value_gives_that_kind_or_a_refusal(value: object):
    fields = Fields({"x": value})
    readers = (
        lambda: fields.integer("x", 0),
        lambda: fields.number("x", 0.0),
        lambda: fields.flag("x"),
        lambda: fields.text("x"),
        lambda: fields.texts("x"),
        lambda: fields.integers("x"),
        lambda: fields.array("x"),
        lambda: fields.object("x"),
    )
    for read in readers:
        try:
            read()
        except Refusal as refused:
            assert str(refused).endswith(".") and "\n" not in str(refused)


def test_each_api_says_no_in_its_own_shape():
    wrong, odd = Refusal("No.", malformed=True), Refusal("No.", param="top_p")
    flat = {"object": "error", "message": "No.", "type": "Bad Request", "param": None, "code": 400}
    assert native_body(wrong) == flat
    assert native_body(odd) == {"error": {"message": "No."}}
    said = openai_body(odd)
    assert (said["object"], said["message"], said["type"], said["code"]) == ("error", "No.", "BadRequestError", 400)
    assert said["error"] == {"message": "No.", "type": "invalid_request_error", "param": "top_p", "code": 400}
