"""A server on a free port of this machine over a real engine with the small model, for as long as a test lasts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.app import EngineServer
from miles.backends.native.server.config import ServeConfig
from miles.backends.native.server.model_info import ModelInfo
from miles.cluster.executor import ThreadExecutor
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.processor import load_processor
from miles.sync.publish import Publication

T = TypeVar("T")
PROMPT = [5, 17, 300, 44, 8, 99, 120]
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A server, its engine, and a client."""

    server: EngineServer
    engine: NativeEngine
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any = None, *, raw: bytes | None = None, **more: Any) -> tuple[int, Any]:
        """The status and the JSON of the reply, or its text."""
        how: dict[str, Any] = {"json": body} if raw is None else {"data": raw}
        async with self.session.post(self.url + path, **how, **more) as response:
            return response.status, _read(await response.text())

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **more) as response:
            return response.status, _read(await response.text())

    async def generate(self, **body: Any) -> Any:
        """What /generate answers to a request it serves."""
        status, reply = await self.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY} | body)
        assert status == 200, reply
        return reply

    async def stream(self, path: str, body: Any) -> list[Any]:
        """The pieces of a stream, which ends as it must."""
        async with self.session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let others go on until it holds."""
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.001)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@asynccontextmanager
async def serving(
    folder: Path, config: ServeConfig | None = None, *, key: str | None = None, lora: Any = None, **knobs: Any
) -> AsyncIterator[Live]:
    """Serve ``folder``; when all is over nothing may be held."""
    config = config or ServeConfig()
    tokenizer = None if config.skip_tokenizer_init else load_processor(folder)
    decoder, run = hf.load(folder, device="cpu"), ThreadExecutor("engine")
    engine = NativeEngine(
        decoder.spec,
        device="cpu",
        dtype=decoder.head().dtype,
        config=NativeConfig(**{"engine_kv_tokens": 8192, "engine_page_size": 8} | knobs),
        run=run,
        decode=None if tokenizer is None else tokenizer.decode,
        lora=lora,
    )
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    await Publication(weights=lambda: weights, engines=[engine], transport="shared", run=run).publish(Version())
    model_info = ModelInfo(model_path=str(folder), tokenizer_path=str(folder), served_model_name="tiny")
    server = EngineServer(engine, tokenizer, config=config, model_info=model_info, api_key=key)
    port = await server.start()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
            yield Live(server=server, engine=engine, port=port, session=session)
        await engine.resume()
        await server.handler.lock.wait_idle()
        await engine.flush_cache()
        engine.check()
    finally:
        await server.stop()
        await engine.close()
        run.close()


def served(story: Callable[[Live], Awaitable[T]], folder: Path, config: ServeConfig | None = None, **more: Any) -> T:
    """Run ``story`` with a server."""

    async def report_value() -> T:
        async with serving(folder, config, **more) as live:
            return await story(live)

    return asyncio.run(report_value())
