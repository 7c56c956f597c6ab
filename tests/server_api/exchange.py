"""A request exchange and how two replies to it are compared: varying fields by kind, all others exactly."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import httpx

NEAR = 1e-4
"""How far apart log-probs of two servers may be."""

# What depends on the clock, the machine or the server's own words is compared by its kind only.
VARIES = {
    *("created", "e2e_latency", "ts_tic", "timestamp", "message", "cached_tokens", "owned_by", "version"),
    *("model_path", "tokenizer_path", "served_model_name"),
}
# Times that SGLang adds to meta_info with --enable-metrics; ours are in /metrics.
TIMES = {
    *("forward_entry_time", "prefill_finished_time", "queue_time", "request_received_ts", "request_finished_ts"),
    *("api_server_dispatch_finish_ts", "decode_throughput", "response_sent_to_client_ts"),
}
# What one of the two says and the other need not: how pages are counted, an error in OpenAI's own shape, embeddings.
LOOSE = {"cached_tokens_details", "error", "param", "embedding", "load_format", "tool_call_parser"}
# SGLang has three words for one thing, by where it noticed; ours has two.
WRONG = {"BadRequestError", "BadRequest", "Bad Request"}
FRESH = re.compile(r"[0-9a-f]{32}|call_[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request, described in a sentence. Where the two servers differ on purpose, ``why`` says so and ``ours`` how.

    ``fatal``: SGLang's process ends on it, so that it is not sent there.
    """

    name: str
    path: str
    body: Any = None
    raw: str | None = None
    method: str = "POST"
    ours: int | None = None
    why: str = ""
    fatal: bool = False

    def send(self, http: httpx.Client) -> httpx.Response:
        if self.raw is not None:
            headers = {"Content-Type": "application/json"}
            return http.request(self.method, self.path, content=self.raw, headers=headers)
        return http.request(self.method, self.path, json=self.body)


def read_reply(response: httpx.Response) -> dict[str, Any]:
    """A reply as it is written down: status, kind of content, and the body without what varies."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "application/json":
        body = steady(response.json())
    elif kind == "text/event-stream":
        body = [steady(event) for event in events_of(response.text)]
    else:
        kind, body = "", "text" if response.text.strip() else ""
    return {"status": response.status_code, "kind": kind, "body": body}


def events_of(text: str) -> list[Any]:
    """The objects of a stream of events, which must end with ``[DONE]``."""
    lines = [line for line in text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]", lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def steady(value: Any, key: str = "") -> Any:
    if key in VARIES and not isinstance(value, dict | list):
        return kind_of(value)
    if isinstance(value, dict):
        return {name: steady(each, name) for name, each in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [steady(each, key) for each in value]
    if key == "type" and value in WRONG:
        return "bad request"
    if isinstance(value, str) and FRESH.fullmatch(value):
        return "fresh"
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 6)
    return value


def kind_of(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two replies differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = [name for name in ours.keys() | theirs.keys() if name not in LOOSE]
        if "error" in theirs:  # an error in this shape must be there in this shape
            names.append("error")
        found: list[str] = []
        for name in sorted(set(names)):
            if name not in ours or name not in theirs:
                found.append(f"{path}.{name} is missing {'here' if name not in ours else 'there'}")
            else:
                found += differences(ours[name], theirs[name], f"{path}.{name}")
        return found
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path} has {len(ours)} against {len(theirs)}"]
        return [
            line
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for line in differences(a, b, f"{path}[{i}]")
        ]
    if isinstance(ours, float) or isinstance(theirs, float):
        near = kind_of(ours) == kind_of(theirs) == "number" and abs(ours - theirs) <= NEAR
        return [] if near else [f"{path} is {ours} against {theirs}"]
    return [] if ours == theirs and type(ours) is type(theirs) else [f"{path} is {ours!r} against {theirs!r}"]
