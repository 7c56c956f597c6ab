"""Whatever is sent, our server neither fails nor hangs, and what it held is free again.

Two ways to be unkind: bodies drawn from the server's own ``/openapi.json`` (by Schemathesis), and real requests with
one part exchanged for something else.
"""

import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server_api import exchanges, openai_exchanges
from tests.server_api.exchange import Exchange
from tests.server_api.live_servers import Wire, miles
from tests.tiers import examples

# Joining a group waits for its other members, who are not there.
WAITS = "/init_weights_update_group"
PATIENCE = 4.0
SENT = [each for each in (*exchanges.EXCHANGES, *openai_exchanges.EXCHANGES) if each.body and each.path != WAITS]
CALM = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def fuzzed(folders):
    """A server of its own: what is sent here may pause it, put it to sleep or rename its weights."""
    with miles(folders.a, "--engine-max-running", "8", kv_tokens=2048) as wire:
        yield wire
        put_right(wire)
        wire.until(lambda: not wire.busy())
        wire.hosted.engine.check()
        assert wire.post("/flush_cache").status_code == 200
        health = wire.hosted.call(wire.hosted.engine.health())
        assert health["free_pages"] == health["pages"]


def put_right(wire: Wire) -> None:
    wire.post("/continue_generation")
    wire.post("/resume_memory_occupation")


def endured(wire: Wire, send: Any) -> None:
    """Send something: an answer below 500 comes, or the client tires of a long one; the server is well either way."""
    try:
        response = send()
        assert response.status_code < 500 or response.status_code == 503, response.text
    except (httpx.ReadTimeout, TimeoutError):
        pass
    finally:
        put_right(wire)
    assert wire.http.get("/health").status_code == 200


def looked_after(wire: Wire) -> None:
    wire.until(lambda: not wire.busy())
    wire.hosted.engine.check()


def drawn_from_the_schema(case: schemathesis.Case, fuzzed: Wire) -> None:
    def send() -> httpx.Response:
        asked = case.as_transport_kwargs(base_url=fuzzed.url)
        return httpx.request(
            asked["method"],
            asked["url"],
            params=asked.get("params"),
            headers=dict(asked.get("headers") or {}),
            content=_bytes_of(asked),
            timeout=PATIENCE,
        )

    endured(fuzzed, send)


def _bytes_of(asked: dict[str, Any]) -> bytes | None:
    if asked.get("json") is not None:
        return json.dumps(asked["json"]).encode()
    data = asked.get("data")
    return data.encode() if isinstance(data, str) else data if isinstance(data, bytes) else None


def fuzz_the_schema(fuzzed: Wire, examples: int) -> int:
    """Every operation with so many bodies; returns how many operations there are."""
    operations = [
        found.ok() for found in schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json").get_all_operations()
    ]
    for operation in operations:

        @settings(CALM, max_examples=examples)
        @given(case=operation.as_strategy())
        def endure(case: schemathesis.Case) -> None:
            drawn_from_the_schema(case, fuzzed)

        endure()
    return len(operations)


def test_no_request_of_the_schema_makes_the_server_fail(fuzzed: Wire):
    assert fuzz_the_schema(fuzzed, 2) > 20


@pytest.mark.slow
def test_no_request_of_the_schema_makes_the_server_fail_in_the_long_run(fuzzed: Wire):
    assert fuzz_the_schema(fuzzed, 200) > 20


# -- real requests, spoilt ------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 40)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["", "a", "$$ANY$$", "(", "\ud800", "<|im_end|>", "[a-z]{1,9}", "9" * 400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where something in a body can be exchanged."""
    found = [path] if path else []
    if isinstance(value, dict):
        return found + [place for name, each in value.items() for place in places(each, (*path, name))]
    if isinstance(value, list):
        return found + [place for i, each in enumerate(value[:3]) for place in places(each, (*path, i))]
    return found


def exchanged(value: Any, path: tuple, other: Any) -> Any:
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = exchanged(copy[path[0]], path[1:], other)
    return copy


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[Exchange, Any]:
    exchange = draw(st.sampled_from(SENT))
    body = exchange.body
    for _ in range(draw(st.integers(1, 2))):
        body = exchanged(body, draw(st.sampled_from(places(body))), draw(ANYTHING))
        if not isinstance(body, dict) or not places(body):
            break
    return exchange, body


def sent_spoilt(fuzzed: Wire, exchange: Exchange, body: Any) -> None:
    text = json.dumps(body).encode("utf-8", "surrogatepass")
    headers = {"Content-Type": "application/json"}

    def send() -> httpx.Response:
        return fuzzed.http.request(exchange.method, exchange.path, content=text, headers=headers, timeout=PATIENCE)

    endured(fuzzed, send)


@settings(CALM, max_examples=examples(100))
@given(request=spoilt())
def test_no_spoilt_request_makes_the_server_fail(fuzzed: Wire, request: tuple[Exchange, Any]):
    sent_spoilt(fuzzed, *request)


@pytest.mark.slow
@settings(CALM, max_examples=examples(5000))
@given(request=spoilt())
def test_no_spoilt_request_makes_the_server_fail_in_the_long_run(fuzzed: Wire, request: tuple[Exchange, Any]):
    sent_spoilt(fuzzed, *request)


def test_nothing_is_held_when_all_is_done(fuzzed: Wire):
    looked_after(fuzzed)
