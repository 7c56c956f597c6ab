"""Whatever is sent to whichever endpoint, the answer is never a 500, and nothing stays held."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.backends.native.server.live import Live, served, serving
from tests.backends.native.server.test_chat import WRONG as WRONG_CHATS
from tests.backends.native.server.test_fields import JSON
from tests.backends.native.server.test_generate import WRONG, WRONG_SAMPLING

STEERED = (
    *("/abort_request", "/pause_generation", "/release_memory_occupation", "/update_weights_from_disk"),
    *("/update_weights_from_tensor", "/init_weights_update_group", "/update_weights_from_distributed"),
    *("/destroy_weights_update_group", "/get_weights_by_name", "/update_weight_version"),
)


def test_wrong_bodies_are_400s_in_the_apis_own_shape(folder: Path):
    async def story(live: Live) -> None:
        for body, says in [
            *WRONG,
            *(({"text": "a", "sampling_params": wrong}, says) for wrong, says in WRONG_SAMPLING),
        ]:
            status, told = await live.post("/generate", body)
            message = told["message"] if "object" in told else told["error"]["message"]
            assert status == 400 and message.startswith(says), (body, told)
            if "object" not in told and isinstance(body.get("stream", False), bool):
                (piece,) = await live.stream("/generate", body | {"stream": True})
                assert piece["error"]["code"] == 400 and piece["error"]["message"].startswith(says)
        for body, says in WRONG_CHATS:
            wrong = {"messages": [{"role": "user", "content": "a"}]} | body
            status, told = await live.post("/v1/chat/completions", wrong)
            assert status == 400 and told["error"]["message"] == told["message"], (body, told)
            assert told["message"].startswith(says) and told["object"] == "error"

    served(story, folder)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions", *STEERED])
def test_what_is_no_object_is_a_400(folder: Path, path: str):
    async def story(live: Live) -> None:
        headers = {"Content-Type": "application/json"}
        for raw in (b"", b"[1, 2]", b"{", b"null", b'"x"', b"\xff\xfe", b'{"text": "\\ud800"}', b"[" * 5000):
            status, told = await live.post(path, raw=raw, headers=headers)
            assert status == 400 and "message" in told, (raw, told)
        wrong_kind = await live.post(path, raw=b"a=b", headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert wrong_kind[0] == 400

    served(story, folder)


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

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(path=st.sampled_from((*good, *STEERED)), body=st.dictionaries(fields, JSON, max_size=3), drop=st.booleans())
    def search(path: str, body: dict[str, Any], drop: bool) -> None:
        asked = body if drop else good.get(path, {}) | body
        if path == "/generate" and "sampling_params" not in body:
            asked["sampling_params"] = {"max_new_tokens": 2}
        status, told = loop.run_until_complete(live.post(path, asked))
        loop.run_until_complete(live.post("/continue_generation", {}))
        loop.run_until_complete(live.post("/resume_memory_occupation", {}))
        assert status in (200, 400), (path, asked, told)

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
            status, told = await live.post(path, body)
            assert status == 503 and "was closed and takes no more requests" in str(told), (path, told)

    served(story, folder)
