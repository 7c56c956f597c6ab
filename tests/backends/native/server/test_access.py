"""Who may send requests, and how slowly: keys, web pages, unread bodies, and texts that are not tokenized."""

import asyncio
from pathlib import Path

import pytest
from tests.backends.native.server.live import Live, served


async def talk(live: Live, *pieces: bytes) -> bytes:
    """Send pieces; all that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    reply = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return reply


def test_a_web_page_cannot_use_a_server_without_a_key_with_or_without_an_origin(folder: Path):
    async def story(live: Live) -> None:
        for site in ("cross-site", "same-site"):
            assert (await live.get("/flush_cache", headers={"Sec-Fetch-Site": site}))[0] == 403
        assert (await live.post("/flush_cache", headers={"Origin": "http://evil.example"}))[0] == 403
        assert (await live.get("/flush_cache", headers={"Host": "evil.example"}))[0] == 403
        assert (await live.get("/flush_cache", headers={"Sec-Fetch-Site": "none"}))[0] == 200
        assert (await live.get("/flush_cache"))[0] == (await live.post("/flush_cache"))[0] == 200

    served(story, folder)


def test_only_health_and_metrics_need_no_key(folder: Path):
    async def story(live: Live) -> None:
        none = {"Authorization": "none"}
        for path in ("/health", "/metrics"):
            assert (await live.get(path, headers=none))[0] == 200
        for path in ("/health_generate", "/healthy", "/metricsx", "/flush_cache", "/v1/models"):
            assert (await live.get(path, headers=none))[0] == 401
        assert (await live.get("/health_generate"))[0] == 200

    served(story, folder, key="secret")


def test_the_body_of_a_request_without_the_key_is_not_read(folder: Path):
    announced = 1 << 30

    async def story(live: Live) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % announced)
        reply = await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
        assert b" 401 " in reply
        sent, piece = 0, bytes(1 << 20)
        with pytest.raises(ConnectionError):
            while sent < announced:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 30)
                sent += len(piece)
        assert sent < 64 << 20, "more than the buffers of two sockets"
        writer.transport.abort()

    served(story, folder, key="secret")


def test_a_client_that_sends_too_slowly_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("miles.rollout.serving.http.BODY_SECONDS", 0.1)
    monkeypatch.setattr("miles.rollout.serving.http_runner.CONNECTION_SECONDS", 0.2)

    async def story(live: Live) -> None:
        post = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
        assert b"The body came too slowly: 1 bytes" in await talk(live, post)
        assert await talk(live, b"POST /generate HTTP/1.1\r\nHost: loc") == b""
        assert await talk(live) == b""
        assert (await live.generate())["output_ids"]

    served(story, folder)


def test_a_text_far_longer_than_the_context_is_refused_before_it_is_tokenized(folder: Path):
    long = "a" * (64 * 512 + 1)

    async def story(live: Live) -> None:
        def tokenize(*_: object) -> list[int]:
            raise AssertionError("it is tokenized")

        tokenizer = live.server.handler.tokenizer
        assert tokenizer is not None
        tokenizer.prompt = tokenizer.encode = tokenize  # pyright: ignore[reportAttributeAccessIssue]
        for path, body in (
            ("/generate", {"text": long}),
            ("/v1/completions", {"prompt": long}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ):
            status, response = await live.post(path, body)
            assert status == 400 and "far more than the context" in response["error"]["message"], response

    served(story, folder)
