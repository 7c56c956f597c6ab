"""Raw bytes at every operation of the engine server, the session server and the router.

Whatever is sent, no answer is a 500, nothing hangs, and afterwards a correct request has the very answer it had before.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rollout.session.server.live_session_server import Scripted, hosted
from tests.server_api.live_servers import Wire, miles
from tests.tiers import examples

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.router import Router
from miles.models.tokenizer import load_tokenizer

PATIENCE = 60.0
CALM = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)
ASKED = {
    "input_ids": [5, 17, 44, 8],
    "sampling_params": {"max_new_tokens": 6, "sampling_seed": 3, "temperature": 0.8},
    "return_logprob": True,
}
ROUTER_OPERATIONS = (
    *(("GET", path) for path in ("/engines", "/list_workers", "/metrics", "/nothing")),
    *(("POST", path) for path in ("/engines", "/add_worker", "/remove_worker", "/nothing", "/v1/responses")),
    ("DELETE", "/engines/none"),
    ("OPTIONS", "/generate"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A server, its operations, and how a request that is correct is answered."""

    port: int
    operations: tuple[tuple[str, str], ...]
    ask: Any
    mend: Any
    # A router answers 502 where an engine refused what it broadcasts.
    allowed: tuple[int, ...] = (501, 503)


def _engine_operations(wire: Wire) -> tuple[tuple[str, str], ...]:
    found = schemathesis.openapi.from_url(f"{wire.url}/openapi.json").get_all_operations()
    return tuple((each.ok().method.upper(), each.ok().path.replace("{model}", "tiny")) for each in found)


def _ask(url: str) -> Any:
    def ask() -> Any:
        httpx.post(f"{url}/flush_cache", timeout=60)  # a prompt from the cache is rounded otherwise
        response = httpx.post(f"{url}/generate", json=ASKED, timeout=60)
        assert response.status_code == 200, response.text
        reply = response.json()
        return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]

    return ask


def _mend(wire: Wire) -> Any:
    def mend() -> None:
        wire.post("/continue_generation")
        wire.post("/resume_memory_occupation")

    return mend


@contextmanager
def _routed(wire: Wire) -> Iterator[int]:
    assert wire.hosted is not None
    hosted_engine = wire.hosted

    async def start() -> tuple[Router, int]:
        router = Router(
            RouterConfig(port=0, engine_urls=(wire.url,), health_check_interval_secs=0.2), log=lambda _: None
        )
        return router, await router.start()

    router, port = hosted_engine.call(start())
    try:
        wire.until(lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200)
        yield port
    finally:
        hosted_engine.call(router.close())


@pytest.fixture(scope="module")
def engine_server(folders) -> Iterator[Wire]:
    with miles(folders.a, "--engine-max-running", "8", kv_tokens=2048) as wire:
        yield wire
        wire.until(lambda: not wire.busy())
        assert wire.hosted is not None
        wire.hosted.engine.check()


@pytest.fixture(scope="module", params=["engine server", "router", "session server"])
def target(request: pytest.FixtureRequest, folders) -> Iterator[Target]:
    if request.param == "session server":
        tokenizer = load_tokenizer(folders.a)
        with hosted(tokenizer, Scripted(tokenizer, lambda context, n: f"Hello {len(context)}.")) as host:
            base = host.open()
            path = base[base.index("/sessions") :]
            rest = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
            operations = [("POST", "/sessions"), ("GET", "/health"), ("GET", path), ("GET", f"{path}/trajectory")]
            operations += [("GET", f"{path}/v1/models"), ("GET", f"{path}/v1/models/a"), ("DELETE", "/sessions/none")]
            operations += [("POST", f"{path}{each}") for each in rest]
            body = {"messages": [{"role": "user", "content": "Hi"}]}

            def ask() -> Any:
                response = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60)
                assert response.status_code == 200, response.text
                return response.json()["choices"]

            yield Target(int(httpx.URL(base).port or 0), tuple(operations), ask, lambda: None)
        return
    wire: Wire = request.getfixturevalue("engine_server")
    operations = _engine_operations(wire)
    assert len(operations) > 30
    port = httpx.URL(wire.url).port
    assert port is not None
    if request.param == "engine server":
        yield Target(port, operations, _ask(wire.url), _mend(wire))
        return
    with _routed(wire) as port:
        url = f"http://127.0.0.1:{port}"
        yield Target(port, (*operations, *ROUTER_OPERATIONS), _ask(url), _mend(wire), (501, 502, 503))


BODIES = [
    *(b"", b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 2000, b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500),
    *(
        b'{"rid": "\xed\xa0\x80"}',
        rb'{"rid": "\ud800", "session_id": "\udfff"}',
        b'{"text": "\xc0\x80"}',
        b"\xef\xbb\xbf{}",
    ),
    *('{"text": "a"}'.encode(codec) for codec in ("utf-16", "utf-16-be", "utf-32")),
    *(b'{"text": NaN}', b'{"priority": 1e999}', b'{"priority": ' + b"9" * 5000 + b"}", b'{"text": "a", "text": 1}'),
    b'{"text": "a", "sampling_params": {"repetition_penalty": 1e-300, "temperature": 1e-40, "top_p": 1e-300}}',
    rb'{"text": "a", "sampling_params": {"stop_regex": "^(([\\s\\S])+)+\\x00$", "max_new_tokens": 4}}',
    *(b'{"new_version": "\\u0000"}', b'{"model_path": "' + b"a" * 5000 + b'"}', b'{"model_path": "\\u0000"}'),
    b'{"text": "' + b"a" * 200_000 + b'"}',
]
FIELDS = b"text prompt rid routing_key session_id new_version model_path folder name url group_name model".split()


def fill_fields(value: bytes) -> bytes:
    """A body with this string in every field that takes one."""
    fields = b", ".join(b'"%s": "%s"' % (name, value) for name in FIELDS)
    message = b'[{"role": "user", "content": "%s"}]' % value
    return b'{%s, "messages": %s, "max_tokens": 2, "sampling_params": {"max_new_tokens": 1}, "action": "load"}' % (
        fields,
        message,
    )


HEADERS = [
    *({}, {b"Content-Type": b"application/json"}, {b"Content-Type": b"application/octet-stream"}),
    {b"Content-Type": b"application/json; charset=utf-16"},
    *({b"Content-Encoding": coding} for coding in (b"gzip", b"deflate", b"br", b"nothing")),
    *({b"Authorization": value} for value in (b"\xff", b"Bearer \xed\xa0\x80", b"")),
    *({b"Origin": b"http://["}, {b"Host": b"["}, {b"x-api-key": b"\x80"}, {b"Sec-Fetch-Site": b"cross-site"}),
]


def send(target: Target, method: str, path: str, headers: dict[bytes, bytes], body: bytes) -> int | None:
    """The status of the answer; None if there was none. A server that hangs is an error."""
    fields = {b"Host": b"127.0.0.1", b"Connection": b"close", b"Content-Length": b"%d" % len(body)} | headers
    head = b"".join(b"%s: %s\r\n" % field for field in fields.items())
    return exchange(target, f"{method} {path} HTTP/1.1\r\n".encode() + head + b"\r\n" + body)


def exchange(target: Target, raw: bytes, *, end: bool = False) -> int | None:
    """Send bytes and read until the server closes the connection; with ``end`` nothing more is said to follow."""
    with socket.create_connection(("127.0.0.1", target.port), PATIENCE) as client:
        reply = b""
        with suppress(ConnectionError):  # it may refuse before it has read everything
            client.sendall(raw)
            if end:
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                reply += piece
    words = reply.split(b" ", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else None


def check(target: Target, before: Any) -> None:
    target.mend()
    assert target.ask() == before


def test_no_operation_fails_on_any_bytes(target: Target):
    before = target.ask()

    @settings(CALM, max_examples=examples(400))
    @given(
        operation=st.sampled_from(target.operations),
        headers=st.sampled_from(HEADERS),
        body=st.sampled_from(BODIES) | st.binary(max_size=64),
    )
    def endure(operation: tuple[str, str], headers: dict[bytes, bytes], body: bytes) -> None:
        status = send(target, *operation, headers, body)
        target.mend()
        assert status is not None and (status < 500 or status in target.allowed), (
            operation,
            headers,
            body[:80],
            status,
        )

    endure()
    check(target, before)


def test_every_operation_takes_bytes_it_cannot_read(target: Target):
    """Each operation with strings that are not UTF-8 or longer than a file name, deep JSON and an unreadable key."""
    before = target.ask()
    for method, path in target.operations:
        if path in ("/metrics", "/get_load", "/v1/loads") and method == "GET":
            continue
        for body in (fill_fields(b"\xed\xa0\x80"), fill_fields(b"a" * 300), b'{"a":' * 500 + b"1" + b"}" * 500):
            status = send(target, method, path, {b"Content-Type": b"application/json", b"x-api-key": b"\xff"}, body)
            assert status is not None and (status < 500 or status in target.allowed), (method, path, body[:20], status)
            if path in ("/pause_generation", "/release_memory_occupation"):
                target.mend()
    check(target, before)


def test_bytes_that_are_no_http_harm_nobody(target: Target):
    before = target.ask()
    body = json.dumps(ASKED).encode()
    whole = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    @settings(CALM, max_examples=examples(200))
    @given(
        raw=st.binary(max_size=200)
        | st.tuples(st.integers(0, len(whole) - 1), st.binary(min_size=1, max_size=3)).map(
            lambda cut: whole[: cut[0]] + cut[1] + whole[cut[0] + len(cut[1]) :]
        )
    )
    def endure(raw: bytes) -> None:
        status = exchange(target, raw, end=True)
        assert status != 500, raw

    endure()
    check(target, before)


def test_what_clients_send_wrongly_is_not_in_the_servers_log(target: Target, caplog: pytest.LogCaptureFixture):
    """They have their reply; a log of tracebacks would be theirs to fill."""
    method, path = next(each for each in target.operations if each[0] == "POST")
    for coding in (b"gzip", b"br", b"deflate", b"nothing"):
        assert send(target, method, path, {b"Content-Encoding": coding}, b"{") in (201, 400, 415)
    for raw in (b"\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        exchange(target, raw, end=True)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
