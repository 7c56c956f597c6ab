"""Requests to the OpenAI half of the API, and to the endpoints that steer the server or tell of it."""

from __future__ import annotations

import json
from typing import Any

from tests.server_api.exchange import Exchange
from tests.server_api.exchanges import DIES, PAIR, SHORT
from tests.server_api.tiny import CONTEXT, END

ALIKE = "SGLang keeps one of several tokens that are spelled alike"
TOOLS = "SGLang shows the template a field of its own in every tool (defer_loading), and the others in its own order"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}
CALLED = [
    {"role": "user", "content": "the fox"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def say(name: str, *, ours: int | None = None, why: str = "", **fields: Any) -> Exchange:
    """A chat of one message; None leaves a field out."""
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 6} | fields
    body = {field: value for field, value in body.items() if value is not None}
    return Exchange(name=f"chat: {name}", path="/v1/chat/completions", body=body, ours=ours, why=why)


def write(name: str, *, ours: int | None = None, why: str = "", **fields: Any) -> Exchange:
    """A completion of four words."""
    body = {"model": "tiny", "prompt": "the quick brown fox", "temperature": 0, "max_tokens": 6} | fields
    body = {field: value for field, value in body.items() if value is not None}
    return Exchange(name=f"completion: {name}", path="/v1/completions", body=body, ours=ours, why=why)


def tell(path: str, *, ours: int | None = None, why: str = "") -> Exchange:
    return Exchange(name=f"tell {path}", path=path, method="GET", ours=ours, why=why)


def steer(name: str, path: str, body: Any, *, ours: int | None = None, why: str = "", fatal: bool = False) -> Exchange:
    return Exchange(name=name, path=path, body=body, ours=ours, why=why, fatal=fatal)


CHAT = [
    say("one message"),
    say(
        "a system prompt and turns", messages=[{"role": "system", "content": "the"}, *MESSAGES, *CALLED[2:], *MESSAGES]
    ),
    say("content in parts", messages=[{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]),
    say("log-probs", logprobs=True),
    say("log-probs of the likeliest", logprobs=True, top_logprobs=2, ours=200, why=ALIKE),
    say("the likeliest without log-probs", top_logprobs=2),
    say("two greedy choices", n=2),
    say("a limit by its newer name", max_tokens=None, max_completion_tokens=3),
    say("no token at all", max_tokens=0),
    say("a stop string", stop=[" "], max_tokens=20),
    say("a stop token", stop_token_ids=[276], max_tokens=20),
    say("the end of the sequence", logit_bias={str(END): 1000}),
    say("a bias", logit_bias={"24": 100}),
    say("a regular expression", regex="(yes|no)", max_tokens=20),
    say("tools, to use or not", tools=[ADD], ours=200, why=TOOLS),
    say("tools, not to be used", tools=[ADD], tool_choice="none"),
    say("a tool's answer", messages=CALLED),
    say("tokens back", return_token_ids=True),
    say("a name", rid="chat-1"),
    say("a model nobody knows", model="nope"),
    say("no model", model=None),
    say("a field nobody knows", no_such_field=1),
    say("arguments of the template", chat_template_kwargs={"x": 1}),
    say("an answer begun", messages=[*MESSAGES, {"role": "assistant", "content": "the"}], continue_final_message=True),
    say("no messages", messages=None),
    say("empty messages", messages=[]),
    say("a role nobody knows", messages=[{"role": "alien", "content": "x"}]),
    say("a negative temperature", temperature=-1),
    say("a temperature that is a word", temperature="hot"),
    say("a negative limit", max_tokens=-1),
    say("no choices", n=0),
    say("a tool that is not there", tools=[ADD], tool_choice={"type": "function", "function": {"name": "nope"}}),
    say("a format nobody knows", response_format={"type": "nope"}),
    say("beyond the context", messages=[{"role": "user", "content": "the fox " * CONTEXT}]),
    say("a stream beyond the context", messages=[{"role": "user", "content": "the fox " * CONTEXT}], stream=True),
    Exchange(name="chat: a body that is no JSON", path="/v1/chat/completions", raw="{x"),
    Exchange(name="chat: GET", path="/v1/chat/completions", method="GET"),
]
COMPLETIONS = [
    write("text"),
    write("tokens", prompt=SHORT),
    write("texts", prompt=["the", " dog"]),
    write("batches of tokens", prompt=[SHORT, [5, 17]]),
    write("log-probs", logprobs=2),
    write("log-probs of the drawn only", logprobs=0),
    write("the prompt too", echo=True, logprobs=1),
    write("two greedy choices", n=2),
    write("a stop string", stop=";", max_tokens=20),
    write("a regular expression", regex="[0-9]{3}", max_tokens=10),
    write(
        "a suffix is ignored", suffix="x", ours=400, why="SGLang ignores it in silence; nothing is written before it"
    ),
    write("best of", best_of=2, ours=400, why="SGLang ignores it in silence"),
    write("an empty prompt", prompt=""),
    write("no prompt", prompt=None),
    write("no token at all", max_tokens=0),
    write("words among tokens", prompt=["a", 1]),
    write("a negative temperature", temperature=-1),
    Exchange(name="completion: a body that is no JSON", path="/v1/completions", raw="{x"),
]
TOLD = [
    *map(tell, ("/health", "/health_generate", "/ping", "/get_load", "/v1/models", "/v1/models/tiny")),
    *map(tell, ("/v1/models/nope", "/model_info", "/get_model_info", "/no_such_path")),
]
STEERED = [
    steer("flush an idle cache", "/flush_cache", None),
    steer("abort a name nobody has", "/abort_request", {"rid": "nobody"}),
    steer("abort nothing", "/abort_request", {}),
    steer("abort all of none", "/abort_request", {"abort_all": True}),
    steer("a pause of an unknown kind", "/pause_generation", {"mode": "nope"}),
    steer("go on without a pause", "/continue_generation", {}),
    steer("go on without a body", "/continue_generation", None),
    steer("weights from nowhere", "/update_weights_from_disk", {"model_path": "/no/such/folder"}),
    steer("weights without a folder", "/update_weights_from_disk", {}),
    steer("a version without a name", "/update_weight_version", {}),
    steer("a tensor that is not there", "/get_weights_by_name", {"name": "nope"}),
    steer("tensors without tensors", "/update_weights_from_tensor", {}),
    steer("a group without an address", "/init_weights_update_group", {}),
    steer("a group that is not there", "/destroy_weights_update_group", {"group_name": "nobody"}),
    steer("sleep", "/release_memory_occupation", {}),
    steer("wake", "/resume_memory_occupation", {}),
    steer("sleep of the cache", "/release_memory_occupation", {"tags": ["kv_cache"]}),
    steer("wake of the cache", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    steer("a session", "/open_session", {"capacity_of_str_len": 1000}),
    steer("a session without a size", "/open_session", {}),
    steer("a session that streams", "/open_session", {"capacity_of_str_len": 1000, "streaming": True}),
    steer("the end of a session nobody opened", "/close_session", {"session_id": "nobody"}),
    steer("the end of no session", "/close_session", {}),
    steer("a snapshot of the weights", "/weights_checker", {"action": "snapshot"}),
    steer("a check nobody knows", "/weights_checker", {"action": "nope"}),
    steer(
        "checksums of the weights",
        "/weights_checker",
        {"action": "checksum"},
        ours=200,
        why="SGLang has checksums on CUDA only",
    ),
    steer(
        "weights from a group that is not there",
        "/update_weights_from_distributed",
        {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[320, 32]], "group_name": "nobody"},
        ours=400,
        why=DIES,
        fatal=True,
    ),
    steer(
        "tensors that are none",
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA"]},
        ours=400,
        why=DIES,
        fatal=True,
    ),
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": PAIR, "strict": True}}
EXCHANGES = [*CHAT, *COMPLETIONS, *TOLD, *STEERED]
assert json.dumps([exchange.body for exchange in EXCHANGES])
