"""The router in front of a native engine and stock SGLang with the same weights."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.launch.commands.test_route import started
from tests.server_api.live_servers import Wire, miles, sglang
from tests.server_api.tiny import make

pytestmark = pytest.mark.sglang
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
BODY: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "sampling_params": GREEDY, "return_logprob": True}


def everywhere(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of each engine, through the router."""
    found: dict[str, Any] = {}
    while len(found) < 2:
        answer = client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        found[answer.headers["x-miles-engine"]] = answer.json()
    return found


def states(client: httpx.Client) -> list[tuple[str, str]]:
    return [(engine["state"], engine["weight_version"]) for engine in client.get("/engines").json()["engines"]]


def test_two_kinds_of_engines_are_one(tmp_path: Path):
    first, second = make(tmp_path / "a", 0), make(tmp_path / "b", 1)
    with miles(first) as ours, sglang(first, tmp_path / "sglang.log") as theirs:
        flags = ["--policy", "round_robin", "--health-check-interval-secs", "0.5", "--health-failure-threshold", "1"]
        process, port = started("--engine-urls", ours.url, theirs.url, *flags)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                both_answer_alike(client, ours, theirs, second)
        finally:
            process.terminate()
            process.communicate()


def both_answer_alike(client: httpx.Client, ours: Wire, theirs: Wire, second: Path) -> None:
    ours.until(lambda: states(client) == 2 * [("healthy", "default")])
    before = everywhere(client, BODY)
    assert len({json.dumps(answer["output_ids"]) for answer in before.values()}) == 1
    with client.stream("POST", "/generate", json={**BODY, "stream": True}) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")

    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]

    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    seen = [engine["failures"] for engine in client.get("/engines").json()["engines"]]
    update = {"model_path": str(second), "flush_cache": False, "weight_version": "7"}
    body = client.post("/update_weights_from_disk", json=update)
    assert body.status_code == 200 and body.json()["success"] is True, body.text
    ours.until(lambda: states(client) == 2 * [("healthy", "7")])
    assert [engine["failures"] for engine in client.get("/engines").json()["engines"]] == seen
    assert client.post("/continue_generation", json={}).status_code == 200

    # What was computed under the old weights stays in SGLang's cache, so these are other tokens.
    after = everywhere(client, {**BODY, "input_ids": [9, 10, 11, 12]})
    assert len({json.dumps(answer["output_ids"]) for answer in after.values()}) == 1
    assert [answer["meta_info"]["weight_version"] for answer in after.values()] == ["7", "7"]

    assert theirs.get_json("/server_info")["tp_size"] == 1
    assert client.post("/abort_request", json={"abort_all": True}).status_code == 200
