"""HTTP client of one server with SGLang's native API: stock SGLang or ``miles serve``. Every wait has a deadline.

Responses are read as streams, so that the tokens received are kept whatever happens to the server. ``interrupt_all``
ends all in-flight requests with the tokens they have.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import aiohttp

from miles.backends.remote.response import GenerateResponse, InvalidResponse, RequestDenied
from miles.backends.remote.served_adapters import ServedAdapters
from miles.backends.remote.transports.buckets import Bucket
from miles.core.errors import EngineError
from miles.core.image_files import encode_data_url
from miles.core.media import Images
from miles.core.media_store import PREFIX, MediaStore
from miles.core.protocols import OnTokens, SamplingParams
from miles.core.video_files import parse_manifest

if find_spec("orjson") is None:
    loads = json.loads
else:  # the log-probs of a response are a lot of JSON
    from orjson import loads

PauseMode = Literal["abort", "retract", "in_place"]
ServerKind = Literal["sglang", "miles"]

# Seconds in which a request that was aborted before its first token ends.
_ABORT_SECONDS = 0.5
# Seconds an idle control connection is kept open: fewer than any server keeps one.
_KEEPALIVE_SECONDS = 1.0
CONTROL_SECONDS = 60.0
"""Timeout of control requests that do no work: pause, flush, info."""


class ServerLost(EngineError):
    """The server cannot be reached, fails or is too late; another server may be tried."""


class RequestInterrupted(ServerLost):
    """The request was interrupted by this client, because its server takes no more requests."""


class UntrustedServer(ServerLost):
    """The response of the server is invalid."""


class RequestRejected(EngineError):
    """The server rejects the request; any other would too."""


class UnknownEndpoint(RequestRejected):
    """The server has no such endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server reports about itself. ``seeded``: it samples with the seeds it is given.

    ``has_foreign_draft``: it drafts with a model that is not in the policy's checkpoint, as MTP layers are.
    ``max_lora_rank`` is that of adapters it takes, None if it takes none.
    """

    kind: ServerKind
    model_path: str
    weight_version: str
    ranks: int
    seeded: bool
    has_foreign_draft: bool = False
    max_lora_rank: int | None = None


class SglangClient:
    """Connections to the server at ``url``; errors call it ``name``."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        token: str | None = None,
        vocab_size: int,
        routed_experts: bool = False,
        indexer_topk: bool = False,
        media: MediaStore | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._vocab_size = vocab_size
        self._routed_experts = routed_experts
        self._indexer_topk = indexer_topk
        self._media = media
        self._session: aiohttp.ClientSession | None = None
        self._control_session: aiohttp.ClientSession | None = None
        self._inflight: dict[asyncio.Task[None], GenerateResponse] = {}
        self._info: ServerInfo | None = None
        self._first_path = ""
        self.adapters = ServedAdapters(self.unload_adapter)
        self.has_checksums = True
        """Does the server compute checksums of its weights? Assumed until it rejects the request."""

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_inflight(self) -> int:
        """Number of in-flight requests."""
        return len(self._inflight)

    @property
    def keeps_requests(self) -> bool:
        """Can requests stay with it during a weight update? If so, it reports which weights sampled which token."""
        return self._info is not None and self._info.kind == "miles"

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens = lambda tokens: None,
        images: Images = (),
    ) -> tuple[GenerateResponse, ServerLost | None]:
        """Continue ``tokens``: the response, and why it is incomplete if the server did not end it.

        ``on_tokens`` is called with new tokens as they arrive. Raises ``RequestRejected`` if the request is invalid.
        """
        response = GenerateResponse(
            vocab_size=self._vocab_size,
            limit=sampling.max_new_tokens,
            num_prompt_tokens=len(tokens) if images else None,
        )
        body = self._body(tokens, sampling)
        response.adapter = self.adapters.acquire()
        if response.adapter is not None:
            response.rid = uuid.uuid4().hex
            body |= {"lora_path": response.adapter, "rid": response.rid}
        try:
            if images:
                body |= await asyncio.to_thread(self._image_fields, tokens, images)
            task = await self._run(body, response, on_tokens)
        finally:
            is_counted = response.finish_reason is not None and not response.never_ran
            self.adapters.release(response.adapter, is_counted=is_counted or response.is_lost)
        if task.cancelled():
            return response, RequestInterrupted(f"{self.name} interrupted the request")
        error = task.exception()
        if isinstance(error, ServerLost):
            return response, error
        if error is not None:
            raise error
        return response, None

    async def _run(self, body: dict[str, Any], response: GenerateResponse, on_tokens: OnTokens) -> asyncio.Task[None]:
        """Send a request; returns its task when that is done."""
        task = asyncio.create_task(self._stream(body, response, on_tokens))
        self._inflight[task] = response
        try:
            await asyncio.wait({task})
        finally:
            del self._inflight[task]
            task.cancel()
        return task

    def interrupt_all(self) -> None:
        """End all in-flight requests with the tokens they have."""
        for task in self._inflight:
            task.cancel()

    async def drain(self, seconds: float) -> None:
        """Wait until a paused server has no in-flight requests; those left after so many seconds are interrupted.

        A request that arrived after the pause is answered only when it ends. It has no token, and is not waited for.
        """
        if self._inflight:
            await asyncio.wait(set(self._inflight), timeout=min(seconds, _ABORT_SECONDS))
        for task, response in self._inflight.items():
            if not response.tokens:
                task.cancel()
        if self._inflight:
            await asyncio.wait(set(self._inflight), timeout=seconds)
        self.interrupt_all()
        if self._inflight:
            await asyncio.wait(set(self._inflight))

    async def wait_idle(self, seconds: float) -> None:
        """Wait until a running server has no in-flight requests; those left after so many seconds are interrupted."""
        if self._inflight and seconds > 0:
            await asyncio.wait(set(self._inflight), timeout=seconds)
        self.interrupt_all()
        if self._inflight:
            await asyncio.wait(set(self._inflight))

    def _body(self, tokens: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise RequestRejected(f"{self.name} ignores stop_token_ids when ignore_eos is set; remove one of the two")
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "no_stop_trim": True}
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if self._info is not None and self._info.seeded:
            params["sampling_seed"] = sampling.seed
            if sampling.num_prior_tokens and self._info.kind == "miles":  # SGLang seeds by token position already
                params["sampling_drawn"] = sampling.num_prior_tokens
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, "stream": True}
        flags = {"return_routed_experts": self._routed_experts, "return_weight_versions": self.keeps_requests}
        flags["return_indexer_topk"] = self._indexer_topk
        return body | {name: True for name, enabled in flags.items() if enabled}

    def _image_fields(self, tokens: Sequence[int], images: Images) -> dict[str, Any]:
        """The raw images; our server gets their runs of tokens and digests, SGLang one placeholder for each."""
        if self._media is None:
            raise RequestRejected(f"{self.name} cannot be sent images, since the run has no store of their files")
        if self._info is not None and self._info.kind == "miles":
            return {
                "image_data": [self._encode_media(placed.image.source) for placed in images],
                "image_runs": [[placed.start, placed.length, placed.image.digest] for placed in images],
            }
        if any(placed.image.kind == "video" for placed in images):
            raise RequestRejected(
                f"{self.name} is stock SGLang, which samples frames of a video file itself, and cannot be sent the "
                "frames of this run; use an engine in the process of the run, miles serve, or frames as images"
            )
        data = [self._encode_media(placed.image.source) for placed in images]
        return {"image_data": data, "input_ids": self._collapse_images(tokens, images)}

    def _encode_media(self, source: str) -> Any:
        """An image as a data URL; a video as its frames and their rate."""
        assert self._media is not None
        data = self._media.get(PREFIX + source)
        if (manifest := parse_manifest(data)) is None:
            return encode_data_url(data)
        return {"frames": [encode_data_url(self._media.get(frame)) for frame in manifest.frames], "fps": manifest.fps}

    def _collapse_images(self, tokens: Sequence[int], images: Images) -> list[int]:
        """One placeholder for each image, which SGLang expands again without tokenizing the rest."""
        placeholder = tokens[images[0].start]
        collapsed: list[int] = []
        done = 0
        for placed in images:
            if any(token != placeholder for token in tokens[placed.start : placed.end]):
                raise RequestRejected(
                    f"{self.name} cannot be sent an image whose tokens are more than one repeated placeholder; use an "
                    "engine in the process of the run, or miles serve"
                )
            collapsed += (*tokens[done : placed.start], placeholder)
            done = placed.end
        collapsed += tokens[done:]
        if collapsed.count(placeholder) != len(images):
            raise RequestRejected(
                f"{self.name} cannot be sent a conversation in which the policy has sampled the image placeholder"
            )
        return collapsed

    async def _stream(self, body: dict[str, Any], response: GenerateResponse, on_tokens: OnTokens) -> None:
        try:
            async with self._open().post(f"{self.url}/generate", json=body) as http:
                if http.status != 200:
                    raise self._status_error("/generate", http.status, await http.text())
                async for event in _events(http.content):
                    received = len(response.tokens)
                    response.add_event(event)
                    on_tokens(response.tokens[received:])
                    if response.abort_at_token:
                        await self._abort_running(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            response.is_lost = True
            raise ServerLost(f"{self.name} was lost ({_first_line(error)})") from error
        except RequestDenied as error:
            raise RequestRejected(f"{self.name} rejected the request: {error}") from error
        except InvalidResponse as error:
            raise UntrustedServer(f"{self.name} returned an invalid response: {error}") from error
        if response.finish_reason is None:
            raise ServerLost(f"{self.name} ended its response early")

    # -- control ----------------------------------------------------------------------------

    async def fetch_info(self, seconds: float = CONTROL_SECONDS) -> ServerInfo:
        """Read the kind, the model and the weight version of the server; to be called before other requests."""
        paths = ("/server_info", "/model_info", "/v1/models")
        info, model, models = await asyncio.gather(*(self.request("GET", path, seconds=seconds) for path in paths))
        try:
            kind: ServerKind = "miles" if models["data"][0]["owned_by"] == "miles" else "sglang"
            self._info = ServerInfo(
                kind=kind,
                model_path=str(model["model_path"]),
                weight_version=str(model["weight_version"]),
                ranks=int(info.get("tp_size") or 1),
                seeded=kind == "miles" or bool(info.get("enable_deterministic_inference")),
                has_foreign_draft=kind == "sglang" and self._has_foreign_draft(info, str(model["model_path"])),
                max_lora_rank=int(info.get("max_lora_rank") or 0) if info.get("enable_lora") else None,
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise ServerLost(f"{self.name} at {self.url} does not answer like SGLang ({_first_line(error)})") from error
        return self._info

    def _has_foreign_draft(self, info: Mapping[str, Any], model_path: str) -> bool:
        """Whether stock SGLang has a draft model from elsewhere; the path of the policy is that of its first report,
        since updates from disk change it.
        """
        self._first_path = self._first_path or model_path
        algorithm, path = info.get("speculative_algorithm"), info.get("speculative_draft_model_path")
        return algorithm not in (None, "NGRAM") and path not in (None, self._first_path)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling; in-flight requests are aborted, retracted or kept in place, by ``mode``."""
        if mode == "abort" and self.adapters.current is not None and self._inflight:
            await self.abort()
            await asyncio.wait(set(self._inflight), timeout=CONTROL_SECONDS)
        await self.request("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.request("POST", "/continue_generation", {})

    async def abort(self) -> None:
        """End all requests with the tokens they have; those that name an adapter have one at least."""
        if self.adapters.current is None:
            await self.request("POST", "/abort_request", {"abort_all": True}, with_requests=True)
        else:
            await asyncio.gather(*(self._abort_running(response) for response in self._inflight.values()))

    async def _abort_running(self, response: GenerateResponse) -> None:
        """Abort a request once it has a token: SGLang keeps the adapters of those that it aborts before they run."""
        response.abort_at_token = not response.tokens
        if response.tokens and response.finish_reason is None:
            await self.request("POST", "/abort_request", {"rid": response.rid}, with_requests=True)

    async def flush(self) -> bool:
        """Empty the prefix cache; false while requests use it."""
        try:
            await self.request("POST", "/flush_cache")
        except RequestRejected:
            return False
        return True

    async def sleep(self, tags: Sequence[str] = ("kv_cache",)) -> None:
        """Release memory: the KV cache, and what else ``tags`` name."""
        await self.request("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str] = ("kv_cache",)) -> None:
        await self.request("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def check_health(self, seconds: float, *, generate: bool) -> str | None:
        """Why it is not healthy, or None; with ``generate`` it must sample a token."""
        path = "/health_generate" if generate else "/health"
        try:
            await self.request("GET", path, seconds=seconds)
        except EngineError as error:
            return str(error)
        return None

    async def server_info(self) -> Mapping[str, Any]:
        return await self.request("GET", "/server_info")

    async def load(self) -> Mapping[str, float]:
        """Numbers of running and waiting requests."""
        loads = await self.request("GET", "/get_load")
        first = loads[0] if isinstance(loads, list) and loads else {}
        return {name: float(value) for name, value in first.items() if name in ("num_reqs", "num_waiting_reqs")}

    # -- adapters ---------------------------------------------------------------------------

    async def list_adapters(self) -> set[str]:
        """The names of the LoRA adapters that it has."""
        models = await self.request("GET", "/v1/models")
        return {str(model["id"]) for model in models["data"] if model.get("parent") is not None}

    async def load_adapter(
        self,
        name: str,
        config: Mapping[str, Any],
        bucket: Bucket,
        checksums: Mapping[str, str],
        *,
        ranks: int,
        seconds: float,
    ) -> None:
        """Load a LoRA adapter under a new name; the server compares the checksums of its tensors."""
        body: dict[str, Any] = {"lora_name": name, "config_dict": dict(config), "expected_checksums": dict(checksums)}
        if self._info is not None and self._info.kind == "miles":
            data = await asyncio.to_thread(lambda: base64.b64encode(bucket.as_safetensors).decode())
            body |= {"serialized_named_tensors": [data], "load_format": "safetensors"}
        else:
            data = await asyncio.to_thread(bucket.to_inline_pickle)
            body |= {"serialized_named_tensors": [data] * ranks, "load_format": "flattened_bucket"}
        answer = await self.request("POST", "/load_lora_adapter_from_tensors", body, seconds=seconds)
        if name not in (answer.get("loaded_adapters") or ()):
            raise RequestRejected(f"{self.name} did not load adapter {name}")

    async def unload_adapter(self, name: str, seconds: float = CONTROL_SECONDS) -> None:
        """Unload a LoRA adapter; waits for requests that use it."""
        await self.request("POST", "/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    # -- control requests ------------------------------------------------------------------------------

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        seconds: float = CONTROL_SECONDS,
        with_requests: bool = False,
    ) -> Any:
        """Send one request; returns the JSON of the response, or its text. A ``body`` of bytes is JSON already.

        ``with_requests`` sends it over the session of generation requests, so that it does not overtake them.
        """
        content_type = "application/json" if isinstance(body, bytes) else "application/octet-stream"
        if isinstance(body, bytes):
            body, data = None, body
        payload = {"data": data, "headers": {"Content-Type": content_type}} if data is not None else {}
        try:
            async with asyncio.timeout(seconds):
                session = self._open() if with_requests else self._open_control()
                async with session.request(method, f"{self.url}{path}", json=body, **payload) as http:
                    raw = await http.read()
        except TimeoutError as error:
            raise ServerLost(f"{self.name} did not answer {path} within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{self.name} was lost at {path} ({_first_line(error)})") from error
        value = _parse(raw)
        if http.status >= 400 or (isinstance(value, dict) and value.get("success") is False):
            raise self._status_error(path, http.status, raw.decode(errors="replace"))
        return value

    def _status_error(self, path: str, status: int, text: str) -> EngineError:
        message = f"{self.name} answered {path} with status {status}: {_error_message(text)}"
        if status in (401, 403):
            return RequestRejected(f"{message}; give its key with --rollout-engine-token-env")
        if status == 404:
            return UnknownEndpoint(message)
        return RequestRejected(message) if status < 500 else ServerLost(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A response may take any time: the health monitor interrupts the requests of a server that is stuck.
            limits = aiohttp.ClientTimeout(total=None, sock_connect=30)
            # One connection per request: the server may close a kept one just when it is used again.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=limits, headers=self.headers
            )
        return self._session

    def _open_control(self) -> aiohttp.ClientSession:
        """Session of control requests: those of a weight update follow within milliseconds, and share a connection."""
        if self._control_session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=30)
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._control_session = aiohttp.ClientSession(connector=connector, timeout=limits, headers=self.headers)
        return self._control_session

    async def close(self) -> None:
        """Interrupt in-flight requests and close the connections."""
        await self.drain(0.0)
        await self.adapters.close()
        for session in (self._session, self._control_session):
            if session is not None:
                await session.close()
        self._session = self._control_session = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The JSON objects of a server-sent event stream, up to its ``[DONE]``."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        buffer += chunk
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        for line in lines:
            data = bytes(line).strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data:
                try:
                    yield loads(data)
                except ValueError as error:
                    raise InvalidResponse(f"its event stream contains {data[:60]!r}") from error


def _parse(raw: bytes) -> Any:
    with suppress(ValueError):
        return loads(raw)
    return raw.decode(errors="replace")


def _error_message(text: str) -> str:
    """The message of an error response."""
    value = _parse(text.encode())
    for name in ("message", "error", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return (value if isinstance(value, str) else json.dumps(value)).strip()[:500].rstrip(".") or "no message"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
