"""Sessions on a live server: who replaces, who waits, what a client that left had, and when one is forgotten."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.native.server.live import GREEDY, PROMPT, Live, served
from tests.backends.native.server.test_control_endpoints import LONG, begun

from miles.backends.native.server.api.request_types import SessionParams
from miles.backends.native.server.sessions import MAX_SESSIONS, EngineSession, EngineSessions, StoredRequest
from miles.rollout.serving.errors import RequestError

MORE = [9, 10]


async def opened(live: Live, **how: Any) -> str:
    status, name = await live.post("/open_session", {"capacity_of_str_len": 100, **how})
    assert status == 200, name
    return name


def test_all_that_a_session_has_can_be_replaced(folder: Path):
    async def story(live: Live) -> None:
        name = await opened(live)
        await live.generate(rid="one", session_params={"id": name})
        await live.generate(rid="two", session_params={"id": name, "replace": True})
        status, response = await live.post(
            "/generate", {"input_ids": MORE, "session_params": {"id": name, "rid": "one"}}
        )
        assert status == 400 and "no request 'one'" in response["error"]["message"]
        await live.generate(input_ids=MORE, session_params={"id": name, "rid": "two"})

    served(story, folder)


def test_a_turn_behind_one_under_way_is_refused_or_takes_its_place(folder: Path):
    async def story(live: Live) -> None:
        name = await opened(live)
        task = await begun(live, rid="one", session_params={"id": name})
        behind = {"input_ids": MORE, "sampling_params": GREEDY, "session_params": {"id": name, "rid": "one"}}
        status, response = await live.post("/generate", behind)
        assert status == 400 and "has not ended" in response["error"]["message"]
        behind["session_params"] |= {"replace": True}
        after = (await live.post("/generate", behind))[1]
        cut = await task
        assert cut["meta_info"]["finish_reason"]["type"] == "abort"
        whole = await live.generate(input_ids=[*PROMPT, *cut["output_ids"], *MORE])
        assert after["output_ids"] == whole["output_ids"]

    served(story, folder)


def test_what_a_client_had_that_hung_up_can_be_gone_on_behind(folder: Path):
    async def story(live: Live) -> None:
        name = await opened(live)
        task = await begun(live, rid="one", session_params={"id": name})
        task.cancel()
        await live.until(lambda: not live.server.handler.num_running)
        after = await live.generate(input_ids=MORE, session_params={"id": name, "rid": "one"})
        assert len(PROMPT) + len(MORE) + 2 < after["meta_info"]["prompt_tokens"] < len(PROMPT) + len(MORE) + 120

    served(story, folder)


def test_a_session_takes_one_answer_at_a_time_and_a_batch_of_its_own_turns(folder: Path):
    async def story(live: Live) -> None:
        name = await opened(live)
        body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "n": 2}, "session_params": {"id": name}}
        assert (await live.post("/generate", body))[0] == 400
        turns = [{"id": name}, None]
        both = await live.generate(input_ids=[PROMPT, MORE], rid=["a", "b"], session_params=turns)
        after = await live.generate(input_ids=MORE, session_params={"id": name, "rid": "a"})
        whole = await live.generate(input_ids=[*PROMPT, *both[0]["output_ids"], *MORE])
        assert after["output_ids"] == whole["output_ids"]
        refused = {"input_ids": MORE, "session_params": {"id": name, "rid": "b"}}
        assert (await live.post("/generate", refused))[0] == 400

    served(story, folder)


def test_a_streamed_turn_can_be_gone_on_behind_at_once(folder: Path):
    async def story(live: Live) -> None:
        name = await opened(live)
        asked = {"input_ids": PROMPT, "sampling_params": LONG, "rid": "one", "stream": True}
        pieces = await live.stream("/generate", asked | {"session_params": {"id": name}})
        after = await live.generate(input_ids=MORE, session_params={"id": name, "rid": "one"})
        whole = await live.generate(input_ids=[*PROMPT, *pieces[-1]["output_ids"], *MORE])
        assert after["output_ids"] == whole["output_ids"]

    served(story, folder)


def test_a_session_that_nobody_uses_for_as_long_as_it_said_is_forgotten():
    now = [0.0]
    sessions = EngineSessions(lambda: now[0])
    assert sessions.open("mortal", 10.0) and sessions.open("lasting", None) and not sessions.open("mortal", None)
    now[0] = 9.0
    assert sessions.build_prompt(SessionParams(id="mortal"), [1], None) == [1]
    now[0] = 18.0
    sessions.build_prompt(SessionParams(id="lasting"), [1], None)
    assert len(sessions) == 2
    now[0] = 30.0
    with pytest.raises(RequestError, match="'mortal' is not open"):
        sessions.build_prompt(SessionParams(id="mortal"), [1], None)
    assert len(sessions) == 1 and sessions.open("mortal", None)


def test_the_token_that_begins_a_text_is_no_part_of_its_middle():
    sessions = EngineSessions(lambda: 0.0)
    sessions.open("s", None)

    class FinishedOutput:
        finish_reason = object()
        tokens = (7,)

    sessions.add_request(SessionParams(id="s"), "one", [1, 5], FinishedOutput())  # pyright: ignore[reportArgumentType]
    assert sessions.build_prompt(SessionParams(id="s", rid="one"), [1, 6], 1) == [1, 5, 7, 6]
    sessions.finish_request(SessionParams(id="s"), "one")
    assert sessions.build_prompt(SessionParams(id="s", rid="one"), [6], 1) == [1, 5, 7, 6]
    assert np.array_equal(sessions._sessions["s"].requests["one"].finished_tokens, [7])


def test_there_are_not_more_sessions_than_fit():
    sessions = EngineSessions(lambda: 0.0)
    for i in range(MAX_SESSIONS):
        sessions.open(str(i), None)
    with pytest.raises(RequestError, match="close some"):
        sessions.open("more", None)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_reply_tells_which_weights_drew_which_tokens_if_it_is_asked(folder: Path, other: Path, incremental: bool):
    from miles.backends.native.server.config import ServeConfig

    async def story(live: Live) -> None:
        body = {"input_ids": PROMPT, "sampling_params": LONG, "rid": "long", "stream": True}
        task = asyncio.create_task(live.stream("/generate", body | {"return_weight_versions": True}))
        await live.until(lambda: "long" in live.server.handler._running)
        state = live.server.handler._running["long"]
        await live.until(lambda: len(state.output.logprobs) > 2)
        await live.post("/pause_generation", {"mode": "in_place"})
        drawn = len(state.output.logprobs)
        await live.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "b"})
        await live.post("/continue_generation", {})
        pieces = await task
        assert pieces[-1]["meta_info"]["weight_versions"] == [["default", drawn], ["b", 120 - drawn]]
        for piece in pieces:
            reported = piece["meta_info"]
            assert sum(count for _, count in reported["weight_versions"]) == reported["completion_tokens"]
        assert "weight_versions" not in (await live.generate())["meta_info"]

    served(story, folder, ServeConfig(incremental_streaming_output=incremental))


def test_a_chain_of_many_turns_is_removed_at_once():
    sessions = EngineSession(timeout=None, last_used=0.0)
    empty = np.zeros(0, np.int32)
    for turn in range(5000):
        sessions.requests[str(turn)] = StoredRequest(empty, None, empty, children=[str(turn + 1)])
    sessions.remove(["1"])
    assert list(sessions.requests) == ["0"]
