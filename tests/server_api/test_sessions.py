"""Sessions: a request goes on behind another of its session, and is answered as if all of it had been asked at once."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server_api.exchanges import PROMPT, SHORT
from tests.server_api.live_servers import Wire

SOME = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def session(server: Wire) -> Iterator[str]:
    name = server.ok("/open_session", capacity_of_str_len=1000)
    assert isinstance(name, str) and name
    yield name
    assert server.post("/close_session", {"session_id": name}).status_code == 200


def asked(server: Wire, session: str, tokens: list[int], **where: Any) -> tuple[str, list[int], dict]:
    """A turn of a session: its name, what it wrote, and its metadata."""
    rid = uuid.uuid4().hex
    params = {"id": session, **where}
    answer = server.generate(input_ids=tokens, sampling_params=SOME, rid=rid, session_params=params)
    assert answer["meta_info"]["id"] == rid
    return rid, answer["output_ids"], answer["meta_info"]


def written(server: Wire, tokens: list[int]) -> list[int]:
    return server.generate(input_ids=tokens, sampling_params=SOME)["output_ids"]


@pytest.mark.endpoint("/open_session")
def test_a_turn_goes_on_behind_what_the_one_before_it_wrote(server: Wire, session: str):
    first, one, _ = asked(server, session, PROMPT)
    second, two, meta = asked(server, session, SHORT, rid=first)
    _, three, _ = asked(server, session, [44], rid=second)
    assert one == written(server, PROMPT)
    assert two == written(server, [*PROMPT, *one, *SHORT])
    assert meta["prompt_tokens"] == len(PROMPT) + len(one) + len(SHORT)
    assert three == written(server, [*PROMPT, *one, *SHORT, *two, 44])


@pytest.mark.endpoint("/open_session")
def test_a_session_may_branch_and_begin_again(server: Wire, session: str):
    first, one, _ = asked(server, session, PROMPT)
    for more in (SHORT, [7, 8]):
        assert asked(server, session, more, rid=first)[1] == written(server, [*PROMPT, *one, *more])
    assert asked(server, session, SHORT)[1] == written(server, SHORT)


@pytest.mark.endpoint("/open_session")
def test_a_turn_may_leave_out_what_was_written_or_begin_at_an_offset(server: Wire, session: str):
    first, one, _ = asked(server, session, PROMPT)
    dropped = asked(server, session, SHORT, rid=first, drop_previous_output=True)[1]
    assert dropped == written(server, [*PROMPT, *SHORT])
    assert asked(server, session, SHORT, rid=first, offset=4)[1] == written(server, [*PROMPT[:4], *SHORT])
    assert asked(server, session, SHORT, rid=first, offset=-1)[1] == written(server, [*PROMPT, *one[:-1], *SHORT])


@pytest.mark.endpoint("/open_session")
def test_a_turn_that_replaces_another_takes_the_place_of_what_followed_it(server: Wire, session: str):
    first, one, _ = asked(server, session, PROMPT)
    second, _, _ = asked(server, session, SHORT, rid=first)
    assert asked(server, session, [7, 8], rid=first, replace=True)[1] == written(server, [*PROMPT, *one, 7, 8])
    gone = {"input_ids": [9], "sampling_params": SOME, "session_params": {"id": session, "rid": second}}
    assert server.post("/generate", gone).status_code == 400


@pytest.mark.endpoint("/open_session")
def test_a_turn_behind_nobody_and_a_session_that_is_not_open_are_refused(server: Wire, session: str):
    for params in ({"id": session, "rid": "nobody"}, {"id": "nobody"}):
        body = {"input_ids": SHORT, "sampling_params": SOME, "session_params": params}
        assert server.post("/generate", body).status_code == 400


@pytest.mark.endpoint("/open_session")
def test_a_session_has_its_name_for_itself_until_it_is_closed(server: Wire):
    named = {"capacity_of_str_len": 1000, "session_id": uuid.uuid4().hex}
    assert server.ok("/open_session", **named) == named["session_id"]
    assert server.post("/open_session", named).status_code == 400
    assert server.post("/close_session", {"session_id": named["session_id"]}).status_code == 200
    assert server.ok("/open_session", **named) == named["session_id"]
    assert server.post("/close_session", {"session_id": named["session_id"]}).status_code == 200


@pytest.mark.endpoint("/close_session")
def test_a_session_that_was_closed_is_forgotten(server: Wire):
    name = server.ok("/open_session", capacity_of_str_len=1000)
    first, _, _ = asked(server, name, PROMPT)
    assert server.post("/close_session", {"session_id": name}).status_code == 200
    body = {"input_ids": SHORT, "sampling_params": SOME, "session_params": {"id": name, "rid": first}}
    assert server.post("/generate", body).status_code == 400
