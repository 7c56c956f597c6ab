"""Whatever is sent to whichever endpoint, the answer is never a 500, and nothing stays held."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.backends.native.server.api.test_chat import WRONG as WRONG_CHATS
from tests.backends.native.server.api.test_generate import WRONG, WRONG_SAMPLING
from tests.backends.native.server.live import Live, served, serving
from tests.rollout.serving.test_body import JSON
from tests.tiers import examples

STEERED = (
    *("/abort_request", "/pause_generation", "/release_memory_occupation", "/update_weights_from_disk"),
    *("/update_weights_from_tensor", "/init_weights_update_group", "/update_weights_from_distributed"),
    *("/destroy_weights_update_group", "/get_weights_by_name", "/update_weight_version"),
)


UNREADABLE = (
    *(b"[" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"text": "\xed\xa0\x80"}', b'{"text": "\xff"}'),
    *('{"text": "a"}'.encode(codec) for codec in ("utf-16", "utf-16-le", "utf-32")),
)


def test_wrong_bodies_are_400s_in_the_apis_own_shape(folder: Path):
    async def story(live: Live) -> None:
        for body, says in [
            *WRONG,
            *(({"text": "a", "sampling_params": wrong}, says) for wrong, says in WRONG_SAMPLING),
        ]:
            status, response = await live.post("/generate", body)
            message = response["message"] if "object" in response else response["error"]["message"]
            assert status == 400 and message.startswith(says), (body, response)
            if "object" not in response and isinstance(body.get("stream", False), bool):
                (piece,) = await live.stream("/generate", body | {"stream": True})
                assert piece["error"]["code"] == 400 and piece["error"]["message"].startswith(says)
        for body, says in WRONG_CHATS:
            wrong = {"messages": [{"role": "user", "content": "a"}]} | body
            status, response = await live.post("/v1/chat/completions", wrong)
            assert status == 400 and response["error"]["message"] == response["message"], (body, response)
            assert response["message"].startswith(says) and response["object"] == "error"

    served(story, folder)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", *STEERED])
def test_what_is_no_object_is_a_400(folder: Path, path: str):
    async def story(live: Live) -> None:
        headers = {"Content-Type": "application/json"}
        for raw in (b"", b"[1, 2]", b"{", b"null", b'"x"', b"\xff\xfe", b'{"text": "\\ud800"}', *UNREADABLE):
            status, response = await live.post(path, raw=raw, headers=headers)
            assert status == 400 and "message" in response, (raw, response)
        wrong_kind = await live.post(path, raw=b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert wrong_kind[0] == 400

    served(story, folder)


def test_headers_and_names_of_any_kind_are_no_500s(folder: Path):
    async def story(live: Live) -> None:
        name = {"model_path": "a" * 300}
        for path, body, says in (
            ("/update_weights_from_disk", name, "model_path is not the path of a folder."),
            ("/update_weights_from_disk", {"model_path": "/tmp/\0"}, "model_path is not the path of a folder."),
            ("/weights_publication", {"action": "load", "folder": "é" * 200}, "folder is not the path of a folder."),
            ("/update_weight_version", {"new_version": "a\nb"}, "new_version must be 1 to 256 printable characters."),
            ("/update_weight_version", {"new_version": ""}, "new_version must be 1 to 256 printable characters."),
        ):
            status, response = await live.post(path, body)
            assert status == 400 and response["error"]["message"] == says, response
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        status, response = await live.post("/generate", raw=b'{"text": "not packed"}', headers=packed)
        assert status == 400 and "cannot be decoded" in str(response)
        assert (await live.get("/get_load", headers={"Origin": "http://["}))[0] == 403
        assert (await live.get("/get_load", headers={"Host": "["}))[0] == 403
        assert (await live.get("/v1/models/%ED%A0%80"))[0] in (400, 404)
        # What was refused is not in later replies.
        assert (await live.generate())["meta_info"]["weight_version"] == "default"

    served(story, folder)


async def _ask_raw(live: Live, *lines: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(b"\r\n".join((b"GET /get_load HTTP/1.1", b"Connection: close", *lines, b"", b"")))
    reply = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return reply.split(b"\r\n", 1)[0]


def test_a_key_that_is_not_utf8_is_a_401(folder: Path):
    async def story(live: Live) -> None:
        assert b" 401 " in await _ask_raw(live, b"Host: localhost", b"x-api-key: \xff\xfe")
        assert b" 401 " in await _ask_raw(live, b"Host: localhost", b"Authorization: Bearer \xed\xa0\x80")

    served(story, folder, key="secret")


def test_no_body_of_any_kind_is_a_500(folder: Path):
    """A search through bodies that are nearly right, with one server throughout."""
    loop = asyncio.new_event_loop()
    context = serving(folder)
    live = loop.run_until_complete(context.__aenter__())
    small = {"max_new_tokens": 2, "max_tokens": 2}
    fields = st.sampled_from(
        (
            *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "priority"),
            *("top_logprobs_num", "token_ids_logprob", "stream", "return_routed_experts", "prompt", "messages"),
            *("stop", "n", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "regex", "ebnf"),
            *("json_schema", "logit_bias", "seed", "echo", "stop_token_ids", "names", "dtypes", "shapes", "tags"),
            *("name", "truncate_size", "mode", "group_name", "new_version", "serialized_named_tensors"),
        )
    )
    good: dict[str, dict[str, Any]] = {
        "/generate": {"input_ids": [3, 4], "sampling_params": small | {}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **small},
        "/v1/completions": {"prompt": "a", **small},
    }

    @settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(path=st.sampled_from((*good, *STEERED)), body=st.dictionaries(fields, JSON, max_size=3), drop=st.booleans())
    def search(path: str, body: dict[str, Any], drop: bool) -> None:
        asked = body if drop else good.get(path, {}) | body
        if path == "/generate" and "sampling_params" not in body:
            asked["sampling_params"] = {"max_new_tokens": 2}
        status, response = loop.run_until_complete(live.post(path, asked))
        loop.run_until_complete(live.post("/continue_generation", {}))
        loop.run_until_complete(live.post("/resume_memory_occupation", {}))
        assert status in (200, 400), (path, asked, response)

    try:
        search()
    finally:
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()


def test_an_engine_that_can_make_no_more_steps_is_not_healthy(folder: Path):
    async def story(live: Live) -> None:
        assert (await live.get("/health"))[0] == 200
        await live.engine.close()
        assert (await live.get("/health"))[0] == (await live.get("/health_generate"))[0] == 503
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"model": "tiny", "prompt": "a"})):
            status, response = await live.post(path, body)
            assert status == 503 and "was closed and takes no more requests" in str(response), (path, response)

    served(story, folder)
