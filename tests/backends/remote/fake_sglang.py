"""A server with SGLang's LoRA endpoints that computes nothing, in this process.

It counts the requests of an adapter as SGLang does: an unload waits for them and blocks every other load, and a request
that is aborted while it waits to run is counted for ever. Its answers count upwards from the prompt's last token, or
are a function of prompt and adapter.
"""

import asyncio
import base64
import hashlib
import json
import pickle
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from tests.backends.remote.harness import serve_app


class FakeSglang:
    """``max_running`` requests run at once; ``reject_load`` makes it answer 400 to the next adapters.

    With ``vocab_size`` every bit of the adapter, the prompt and the seed has a say in each token of an answer.
    """

    def __init__(self, folder, *, max_lora_rank: int = 4, max_running: int = 2, vocab_size: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.folder = folder
        self.max_lora_rank = max_lora_rank
        self.label = "default"
        self.adapters: dict[str, dict[str, bytes]] = {}
        self.configs: dict[str, dict] = {}
        self.used: Counter[str] = Counter()
        self.calls: list[str] = []
        self.reject_load = False
        self.held = asyncio.Event()
        self.held.set()
        self._slots = asyncio.Semaphore(max_running)
        self._aborted: dict[str, asyncio.Event] = {}
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()

    # -- LoRA -------------------------------------------------------------------------------

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        async with self._lock:
            name = body["lora_name"]
            if self.reject_load or name in self.adapters:
                why = f"Failed to load LoRA adapter {name}"
                return web.json_response({"success": False, "error_message": why}, status=400)
            data = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            raw = data["flattened_tensor"].numpy().tobytes()
            tensors = {part.name: raw[part.start_idx : part.end_idx] for part in data["metadata"]}
            found = {name: hashlib.sha256(part).hexdigest() for name, part in tensors.items()}
            assert found == body["expected_checksums"], "SGLang exits then"
            self.adapters[name], self.configs[name] = tensors, body["config_dict"]
            self.calls.append(f"load {name}")
            return web.json_response({"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")})

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        async with self._lock:
            if name not in self.adapters:
                return web.json_response({"success": False, "error_message": "no such adapter"}, status=400)
            del self.adapters[name]
            async with self._changed:
                await self._changed.wait_for(lambda: not self.used[name])
            self.calls.append(f"unload {name}")
            return web.json_response({"success": True, "loaded_adapters": dict.fromkeys(self.adapters, "__tensor__")})

    # -- requests ---------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, rid = body.get("lora_path"), body.get("rid", "")
        if name is not None and name not in self.adapters:
            return web.json_response({"error": {"message": f"{name} was never loaded"}}, status=400)
        self.used[name] += 1
        aborted = self._aborted[rid] = asyncio.Event()
        waiting = asyncio.create_task(self._slots.acquire())
        stopped = asyncio.create_task(aborted.wait())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return await self._end(response, self._event(0, [], {"type": "abort", "message": "Abort in waiting queue"}))
        try:
            return await self._sample(body, response, aborted)
        finally:
            self._slots.release()
            stopped.cancel()
            async with self._changed:
                self.used[name] -= 1
                self._changed.notify_all()

    async def _sample(self, body: dict, response: web.StreamResponse, aborted: asyncio.Event) -> web.StreamResponse:
        first, limit = body["input_ids"][-1], body["sampling_params"]["max_new_tokens"]
        tokens = [(first + count) % 300 for count in range(limit + 1)]
        if self.vocab_size is not None:
            tokens = self._mix(body, limit + 1, self.vocab_size)
        for count in range(1, limit + 1):
            reason = {"type": "abort", "message": ""} if aborted.is_set() else None
            reason = {"type": "length", "length": limit} if count == limit else reason
            event = self._event(count, [tokens[count]], reason)
            if reason is not None:
                return await self._end(response, event)
            await response.write(event)
            await self.held.wait()
            await asyncio.sleep(0.001)
        return response

    def _mix(self, body: dict, count: int, vocab_size: int) -> list[int]:
        """Tokens that are a function of a request's adapter, prompt and seed."""
        adapter = self.adapters[body["lora_path"]]
        key = hashlib.shake_256(json.dumps([body["input_ids"], body["sampling_params"]["sampling_seed"]]).encode())
        for name in sorted(adapter):
            key.update(adapter[name])
        digest = key.digest(2 * count)
        return [int.from_bytes(digest[2 * i : 2 * i + 2], "little") % vocab_size for i in range(count)]

    def _event(self, count: int, tokens: list[int], reason: dict | None) -> bytes:
        meta = {
            "completion_tokens": count,
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "finish_reason": reason,
            "weight_version": self.label,
        }
        return b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"

    async def _end(self, response: web.StreamResponse, event: bytes) -> web.StreamResponse:
        await response.write(event + b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for rid, event in self._aborted.items():
            if body.get("abort_all") or rid == body.get("rid"):
                event.set()
        return web.json_response({})

    # -- control ----------------------------------------------------------------------------

    async def set_version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def models(self, request: web.Request) -> web.Response:
        base = {"id": "tiny", "owned_by": "sglang", "parent": None}
        return web.json_response({"data": [base, *({"id": name, "parent": "tiny"} for name in self.adapters)]})

    async def info(self, request: web.Request) -> web.Response:
        lora: dict = {"enable_lora": True, "max_lora_rank": self.max_lora_rank}
        lora |= {"enable_deterministic_inference": self.vocab_size is not None}
        return web.json_response(
            {"model_path": str(self.folder), "weight_version": self.label, "tp_size": 1, "version": "0.5.18", **lora}
        )

    async def control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({})


@asynccontextmanager
async def serving(fake: FakeSglang) -> AsyncIterator[str]:
    """The address of a fake server."""
    app = web.Application(client_max_size=1 << 30)
    posts = {
        "/generate": fake.generate,
        "/load_lora_adapter_from_tensors": fake.load,
        "/unload_lora_adapter": fake.unload,
        "/abort_request": fake.abort,
        "/update_weight_version": fake.set_version,
    }
    for path, handler in posts.items():
        app.router.add_post(path, handler)
    for path, handler in {"/v1/models": fake.models, "/server_info": fake.info, "/model_info": fake.info}.items():
        app.router.add_get(path, handler)
    app.router.add_route("*", "/{path:.*}", fake.control)
    async with serve_app(app) as address:
        yield address
