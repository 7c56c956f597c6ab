"""A server that computes nothing, as a program: it says what a server of ours says, starts at once, and can be told how
to misbehave.

    python stub_server.py [--fail] [--mute] --port PORT

Its answers count upwards from the prompt's last token, one token every few milliseconds, with log-prob -1 each.
"""

import asyncio
import json
import os
import sys

from aiohttp import web

STATE = {"label": "default", "paused": False}


def reply(body) -> web.Response:
    return web.json_response(body)


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    first, limit = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
    for i in range(1, limit + 1):
        while STATE["paused"]:
            await asyncio.sleep(0.005)
        meta = {
            "completion_tokens": i,
            "output_token_logprobs": [[-1.0, first + i, None]],
            "finish_reason": {"type": "length", "length": limit} if i == limit else None,
            "weight_version": STATE["label"],
        }
        await response.write(b"data: " + json.dumps({"output_ids": [first + i], "meta_info": meta}).encode() + b"\n\n")
        await asyncio.sleep(0.002)
    await response.write(b"data: [DONE]\n\n")
    return response


async def publication(request: web.Request) -> web.Response:
    body = await request.json()
    if body["action"] == "commit":
        STATE["label"] = body["weight_version"]
    return reply({"success": True, "verified": len(body.get("digests", {}))})


async def handle_info(request: web.Request) -> web.Response:
    models = {"data": [{"owned_by": "miles"}], "pid": os.getpid()}
    return reply({**models, "model_path": "stub", "weight_version": STATE["label"], "tp_size": 1})


async def health(request: web.Request) -> web.Response:
    if "--mute" in sys.argv and STATE["label"] != "default":
        await asyncio.sleep(3600)
    return web.Response()


async def pause(request: web.Request) -> web.Response:
    STATE["paused"] = True
    return reply({})


async def resume(request: web.Request) -> web.Response:
    STATE["paused"] = False
    return reply({})


async def taken(request: web.Request) -> web.Response:
    await request.read()
    return reply({"success": True})


def main() -> None:
    if "--fail" in sys.argv:
        sys.exit("this server cannot start: out of luck")
    app = web.Application(client_max_size=1 << 30)
    for path in ("/server_info", "/model_info", "/v1/models"):
        app.router.add_get(path, handle_info)
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, health)
    app.router.add_post("/generate", generate)
    app.router.add_post("/weights_publication", publication)
    app.router.add_post("/pause_generation", pause)
    app.router.add_post("/continue_generation", resume)
    for path in ("/weights_publication/bucket", "/abort_request"):
        app.router.add_post(path, taken)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)


if __name__ == "__main__":
    main()
