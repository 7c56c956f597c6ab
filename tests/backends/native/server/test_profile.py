"""A server profiles itself between /start_profile and /stop_profile, and writes a trace with what it computed."""

import gzip
import json
from pathlib import Path

import pytest
from tests.backends.native.server.live import Live, served


def test_the_trace_has_the_operators_of_the_requests_in_between(folder: Path, tmp_path: Path):
    async def story(live: Live) -> None:
        body = {"output_dir": str(tmp_path / "traces"), "profile_prefix": "step-000003", "profile_id": "a"}
        assert await live.post("/start_profile", body) == (200, "Start profiling.\n")
        await live.generate()
        status, reply = await live.post("/start_profile", body)
        assert status == 400 and "/stop_profile" in str(reply)  # one at a time
        assert (await live.get("/stop_profile"))[0] == 200
        await live.generate()  # it serves on

    served(story, folder)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "step-000003-a-TP-0.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"aten::embedding", "aten::mm"} & names or {"aten::embedding", "aten::linear"} <= names


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/stop_profile", {}, "No profile is running"),
        ("/start_profile", {"profile_prefix": "../elsewhere"}, "profile_prefix"),
        ("/start_profile", {"profile_id": ".hidden"}, "profile_id"),
        ("/start_profile", {"output_dir": "/proc/no/such"}, "output_dir"),
    ],
)
def test_what_cannot_be_profiled_is_refused(folder: Path, path: str, body: dict, expected: str):
    async def story(live: Live) -> None:
        status, reply = await live.post(path, body)
        assert status == 400 and expected in str(reply)

    served(story, folder)
