"""Abort, pause and flush: an aborted request says so, and the others continue unchanged."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.server_api.exchanges import GREEDY, PROMPT, SHORT
from tests.server_api.live_servers import Wire

LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
SOME = {"temperature": 0, "max_new_tokens": 80, "ignore_eos": True}
Later = Callable[..., Future[Any]]


@pytest.fixture
def later(server: Wire) -> Iterator[Later]:
    """Send a request from another thread; it has arrived when this returns, unless the server holds it back."""
    with ThreadPoolExecutor(8) as pool:

        def send(*, arrives: bool = True, **body: Any) -> Future[Any]:
            sent = pool.submit(server.http.post, "/generate", json=body)
            if arrives:
                server.until(lambda: server.busy() or sent.done())
            return sent

        yield send
        server.post("/continue_generation")
        server.post("/abort_request", {"abort_all": True})


def reason(answer: dict) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


@pytest.mark.endpoint("/abort_request")
def test_an_aborted_request_answers_with_what_it_has(server: Wire, later: Later):
    whole = server.generate(input_ids=PROMPT, sampling_params=SOME)["output_ids"]
    sent = later(input_ids=PROMPT, sampling_params=LONG, rid="victim", return_logprob=True)
    assert server.post("/abort_request", {"rid": "victim"}).status_code == 200
    response = sent.result()
    answer = response.json()
    assert response.status_code == 200 and reason(answer) == "abort"
    assert answer["meta_info"]["finish_reason"].keys() >= {"type", "message"}
    assert len(answer["output_ids"]) < 400
    assert all(ours == theirs for ours, theirs in zip(answer["output_ids"], whole, strict=False))
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])


@pytest.mark.endpoint("/abort_request")
def test_aborting_one_leaves_the_others_alone(server: Wire, later: Later):
    whole = server.generate(input_ids=SHORT, sampling_params=SOME)
    victim = later(input_ids=PROMPT, sampling_params=LONG, rid="victim")
    other = later(input_ids=SHORT, sampling_params=SOME, rid="other")
    server.post("/abort_request", {"rid": "victim"})
    assert reason(victim.result().json()) == "abort"
    assert other.result().json()["output_ids"] == whole["output_ids"]


@pytest.mark.endpoint("/abort_request")
def test_aborting_all_ends_single_requests_and_batches(server: Wire, later: Later):
    sent = [later(input_ids=PROMPT, sampling_params=LONG), later(input_ids=[PROMPT, SHORT], sampling_params=LONG)]
    server.until(lambda: server.get_json("/get_load")[0]["num_reqs"] == 3)
    server.post("/abort_request", {"abort_all": True})
    single, batch = (each.result().json() for each in sent)
    assert [reason(answer) for answer in (single, *batch)] == ["abort"] * 3


@pytest.mark.endpoint("/abort_request")
def test_an_aborted_stream_ends_as_every_stream(server: Wire, later: Later):
    sent = later(input_ids=PROMPT, sampling_params=LONG, rid="victim", stream=True)
    server.post("/abort_request", {"rid": "victim"})
    assert sent.result().text.rstrip().endswith("data: [DONE]") and '"abort"' in sent.result().text


@pytest.mark.endpoint("/abort_request")
def test_the_name_of_a_batch_aborts_all_of_it(server: Wire, later: Later):
    sent = later(input_ids=[PROMPT, SHORT], sampling_params=LONG, rid="both")
    server.post("/abort_request", {"rid": "both"})
    assert [reason(answer) for answer in sent.result().json()] == ["abort"] * 2


@pytest.mark.endpoint("/generate")
def test_a_name_is_one_requests_at_a_time(server: Wire, later: Later):
    first = later(input_ids=PROMPT, sampling_params=LONG, rid="same")
    assert server.post("/generate", {"input_ids": SHORT, "rid": "same"}).status_code == 400
    server.post("/abort_request", {"rid": "same"})
    first.result()
    assert server.post("/generate", {"input_ids": SHORT, "sampling_params": GREEDY, "rid": "same"}).status_code == 200


@pytest.mark.endpoint("/pause_generation")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_token(server: Wire, later: Later, mode: str):
    whole = server.generate(input_ids=PROMPT, sampling_params=SOME, return_logprob=True)
    sent = later(input_ids=PROMPT, sampling_params=SOME, return_logprob=True)
    assert server.ok("/pause_generation", mode=mode)["status"] == "ok"
    assert server.ok("/continue_generation")["status"] == "ok"
    answer = sent.result().json()
    assert answer["output_ids"] == whole["output_ids"]
    pairs = zip(*(a["meta_info"]["output_token_logprobs"] for a in (answer, whole)), strict=True)
    assert max(abs(ours[0] - theirs[0]) for ours, theirs in pairs) < 1e-4


@pytest.mark.endpoint("/pause_generation")
def test_a_pause_that_aborts_ends_what_runs(server: Wire, later: Later):
    sent = later(input_ids=PROMPT, sampling_params=LONG)
    server.ok("/pause_generation", mode="abort")
    assert reason(sent.result().json()) == "abort"


@pytest.mark.endpoint("/pause_generation")
@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_what_comes_during_a_pause_waits_for_its_end(server: Wire, later: Later, mode: str):
    server.ok("/pause_generation", mode=mode)
    sent = later(input_ids=PROMPT, sampling_params=GREEDY, arrives=False)
    for _ in range(3):
        assert server.get_json("/model_info") and not sent.done()
    server.ok("/continue_generation")
    assert reason(sent.result().json()) == "length"


@pytest.mark.endpoint("/pause_generation")
def test_a_second_pause_and_a_second_continue_are_no_error(server: Wire):
    for path in ("/pause_generation", "/pause_generation", "/continue_generation", "/continue_generation"):
        assert server.ok(path)["status"] == "ok"
    assert reason(server.generate(input_ids=PROMPT, sampling_params=GREEDY)) == "length"


@pytest.mark.endpoint("/abort_request")
def test_what_waits_for_the_end_of_a_pause_can_be_aborted(server: Wire, later: Later):
    server.ok("/pause_generation", mode="in_place")
    sent = later(input_ids=PROMPT, sampling_params=GREEDY, rid="waiting", arrives=False)
    server.until(lambda: server.busy() or server.kind == "sglang")
    server.post("/abort_request", {"rid": "waiting"})
    server.ok("/continue_generation")
    assert reason(sent.result().json()) == "abort"


@pytest.mark.endpoint("/flush_cache")
def test_a_cache_in_use_is_not_flushed(server: Wire, later: Later):
    later(input_ids=PROMPT, sampling_params=LONG, rid="holder")
    assert server.post("/flush_cache").status_code == 400
    server.post("/abort_request", {"rid": "holder"})
    server.until(lambda: not server.busy())
    assert server.post("/flush_cache").status_code == 200


@pytest.mark.endpoint("/flush_cache")
def test_a_flushed_cache_knows_no_prompt(server: Wire):
    prompt = [*range(60, 160)]
    before = server.generate(input_ids=prompt, sampling_params=GREEDY)
    assert server.http.get("/flush_cache").status_code == 200
    after = server.generate(input_ids=prompt, sampling_params=GREEDY)
    assert after["meta_info"]["cached_tokens"] == 0 and after["output_ids"] == before["output_ids"]


@pytest.mark.endpoint("/get_load")
def test_the_load_counts_what_is_under_way(server: Wire, later: Later):
    assert server.get_json("/get_load")[0]["num_reqs"] == 0
    later(input_ids=[PROMPT, SHORT], sampling_params=LONG, rid="counted")
    server.until(lambda: server.get_json("/get_load")[0]["num_reqs"] == 2)
    server.post("/abort_request", {"abort_all": True})


@pytest.mark.endpoint("/health_generate")
def test_a_paused_server_is_not_healthy(server: Wire):
    server.ok("/pause_generation", mode="in_place")
    assert server.http.get("/health_generate", timeout=60).status_code == 503


@pytest.mark.endpoint("/server_info")
def test_the_server_tells_its_size_and_its_state(server: Wire):
    reported = server.get_json("/server_info")
    assert reported["model_path"] == str(server.folder) and reported["max_total_num_tokens"] == 8192
    assert reported["kv_cache_dtype"] == "auto"
    assert isinstance(reported["internal_states"], list) and isinstance(reported["version"], str)
    assert server.get_json("/get_server_info").keys() == reported.keys()


@pytest.mark.endpoint("/release_memory_occupation")
def test_after_sleep_and_wake_all_is_as_before(server: Wire):
    before = server.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert server.post(path).status_code == 200
    assert server.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"] == before


@pytest.mark.endpoint("/metrics")
def test_metrics_are_in_the_format_of_prometheus(server: Wire):
    from prometheus_client.parser import text_string_to_metric_families

    server.generate(input_ids=PROMPT, sampling_params=GREEDY)
    response = server.http.get("/metrics", follow_redirects=True)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    assert len(list(text_string_to_metric_families(response.text))) > 3
