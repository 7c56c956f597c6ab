"""Upstream's engine API: requests to ``/generate``, answered by the run's engine without a network.

A function posts tokens or text and gets text, tokens and log-probs; the engine's spans are recorded, so that the
sample can be traced back to them (see ``convert``). Requests to other hosts are HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from miles.core.errors import HookError
from miles.core.protocols import Completion, Engine, SamplingParams, SpeculationCounts
from miles.core.types import Prompt, Status, Tokens
from miles.hooks.compat.types import UpstreamContext

_SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)} - {"seed"}
# Parameters that only affect the text of a reply, and the seed, which each request gets from the run.
_TEXT_FIELDS = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed"}
_HTTP_SECONDS = 600.0
_ABORTED = Completion(spans=(), status=Status.ABORTED, finish_reason="abort")


@dataclass(slots=True, kw_only=True)
class TrajectoryRequests:
    """The engine requests of one running trajectory, each with its completion."""

    run: UpstreamContext
    engine: Engine
    sampling: SamplingParams
    evaluation: bool = False
    asked: list[tuple[Tokens, Completion]] = field(default_factory=list)
    in_flight: set[asyncio.Future[Completion]] = field(default_factory=set)
    state: GenerateState | None = None

    def make_seed(self, tokens: Tokens) -> int:
        """The seed of the next request."""
        return self.sampling.seed + len(self.asked)

    def record(self, tokens: Tokens, completion: Completion) -> None:
        """Keep a request and its completion."""
        self.asked.append((tokens, completion))

    def open_lookup(self) -> CompletionLookup:
        """A search through the completions for one branch of a trajectory."""
        return CompletionLookup(self.asked)

    def abort(self) -> None:
        """Cancel the requests in flight; each returns without tokens."""
        for request in tuple(self.in_flight):
            request.get_loop().call_soon_threadsafe(request.cancel)


class CompletionLookup:
    """Finds completions by the tokens before them, in the order in which they were asked for."""

    def __init__(self, asked: Sequence[tuple[Tokens, Completion]]) -> None:
        self._unused = list(asked)

    def find(self, before: Tokens, after: Tokens) -> Completion | None:
        """The completion of exactly ``before`` that starts as ``after`` does; earlier ones were discarded."""
        for number, (tokens, completion) in enumerate(self._unused):
            if np.array_equal(tokens, before) and _starts_as(completion, after):
                del self._unused[: number + 1]
                return completion
        return None


_MAX_INPUTS = 1 << 16


@dataclass(slots=True, kw_only=True)
class RolloutRequests(TrajectoryRequests):
    """The engine requests of whole rollout functions, found by the tokens they asked for.

    The seed of a request depends on its tokens and on how many requests had the same: not on the order of others.
    ``held_out`` are the prompts of each held-out set, during an evaluation.
    """

    by_input: dict[bytes, list[Completion]] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    held_out: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)

    def make_seed(self, tokens: Tokens) -> int:
        """A seed that differs for requests with the same tokens."""
        number = self.counts.get(tokens.tobytes(), 0)
        self.counts[tokens.tobytes()] = number + 1
        text = f"{self.sampling.seed} {number} ".encode() + tokens.tobytes()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def record(self, tokens: Tokens, completion: Completion) -> None:
        self.by_input.setdefault(tokens.tobytes(), []).append(completion)
        while len(self.by_input) > _MAX_INPUTS:
            del self.by_input[next(iter(self.by_input))]

    def open_lookup(self) -> CompletionLookup:
        return _InputLookup(self.by_input)

    def begin(self, sampling: SamplingParams) -> None:
        """Start a further rollout: requests get other seeds than those of earlier rollouts."""
        self.sampling = sampling
        self.counts.clear()


class _InputLookup(CompletionLookup):
    """A search by input tokens; a completion may be found by several samples."""

    def __init__(self, by_input: Mapping[bytes, Sequence[Completion]]) -> None:
        self._by_input = by_input

    def find(self, before: Tokens, after: Tokens) -> Completion | None:
        found = self._by_input.get(before.tobytes(), ())
        return next((completion for completion in found if _starts_as(completion, after)), None)


def _starts_as(completion: Completion, after: Tokens) -> bool:
    ids = [int(token) for span in completion.spans for token in span.tokens]
    size = min(len(ids), len(after))
    return bool(size) and np.array_equal(ids[:size], after[:size])


_CURRENT: ContextVar[TrajectoryRequests | None] = ContextVar("trajectory_requests", default=None)
# A rollout function may start threads of its own, which do not inherit the context: requests of these go here.
_OF_PROCESS: list[RolloutRequests] = []


@contextmanager
def record_requests(trajectory: TrajectoryRequests) -> Iterator[None]:
    """Record engine requests of this context in ``trajectory``."""
    token = _CURRENT.set(trajectory)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def set_process_requests(requests: RolloutRequests) -> None:
    """Record the engine requests of threads without a context, until another run begins."""
    _OF_PROCESS[:] = [requests]


def get_requests(caller: str) -> TrajectoryRequests:
    """The requests of the running function; raises HookError where there is none."""
    requests = _CURRENT.get() or (_OF_PROCESS[0] if _OF_PROCESS else None)
    if requests is None:
        raise HookError(f"{caller} needs a run: call it inside a generate or rollout function.")
    return requests


def sampling_params_dict(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in upstream's format."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(
    url: str, payload: Mapping[str, Any], max_retries: int = 60, headers: Mapping[str, str] | None = None, **_: Any
) -> Any:
    """Send a request: to the run's engine, where ``url`` is the router's ``/generate``, else over HTTP."""
    if urlsplit(url).hostname != ROUTER_HOST:
        return await _send_http(url, payload, headers, max_retries)
    endpoint = urlsplit(url).path.rstrip("/").rpartition("/")[2]
    if endpoint == "abort_request":
        get_requests(url).abort()
        return {}
    if endpoint != "generate":
        raise HookError(
            f"post to {url} does not reach the engine: the router serves /generate and /abort_request to functions; "
            "use a client of your own for other servers."
        )
    requests = get_requests(url)
    tokens, parameters = _parse_input(requests.run, payload), dict(payload.get("sampling_params") or {})
    completion = await _generate(requests, tokens, _parse_sampling(requests, tokens, parameters))
    requests.record(tokens, completion)
    return _format_reply(requests, tokens, completion, parameters)


async def get(url: str, headers: Mapping[str, str] | None = None, **_: Any) -> Any:
    """Read JSON over HTTP; of the router, its list of workers, which is itself, and its health."""
    if urlsplit(url).hostname != ROUTER_HOST:
        return await _send_http(url, None, headers, 1)
    own = f"{urlsplit(url).scheme}://{urlsplit(url).netloc}"
    return {"urls": [own], "workers": [{"url": own}]}


ROUTER_HOST = "engine.invalid"
"""An unreachable name: what is sent to it goes to the engine directly."""


async def _generate(requests: TrajectoryRequests, tokens: Tokens, sampling: SamplingParams) -> Completion:
    request = asyncio.ensure_future(requests.engine.generate(tokens, sampling))
    requests.in_flight.add(request)
    try:
        return await request
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if request.cancelled() and not (task is not None and task.cancelling()):
            return _ABORTED
        raise
    finally:
        requests.in_flight.discard(request)


async def _send_http(
    url: str, payload: Mapping[str, Any] | None, headers: Mapping[str, str] | None, max_retries: int
) -> Any:
    body = None if payload is None else json.dumps(payload).encode()
    content = {} if body is None else {"Content-Type": "application/json"}
    if urlsplit(url).scheme not in ("http", "https"):
        raise HookError(f"{url} is no http address.")
    request = urllib.request.Request(url, data=body, headers={**content, **(headers or {})})

    def send() -> Any:
        with urllib.request.urlopen(request, timeout=_HTTP_SECONDS) as reply:
            return json.loads(reply.read() or b"null")

    for attempt in range(1, max(1, max_retries) + 1):
        try:
            return await asyncio.to_thread(send)
        except OSError:
            if attempt >= max(1, max_retries):
                raise
            await asyncio.sleep(1.0)
    raise AssertionError("the last attempt returns or raises")


def _parse_input(run: UpstreamContext, payload: Mapping[str, Any]) -> Tokens:
    if payload.get("image_data"):
        raise HookError(
            "A request to /generate has image_data, which a function with upstream's signature cannot send here; use "
            "the built-in single_turn or multi_turn generation for images."
        )
    if payload.get("input_ids") is not None:
        ids = payload["input_ids"]
    elif isinstance(payload.get("text"), str):
        ids = run.tokenizer().encode(payload["text"], add_special_tokens=False)
    else:
        raise HookError("A request to /generate has neither input_ids nor text; give it one of them.")
    if not len(ids) or not all(isinstance(i, int | np.integer) for i in ids):
        raise HookError("input_ids of a request to /generate are the tokens of one prompt, as a list of numbers.")
    return np.array(ids, np.int32)


def _parse_sampling(trajectory: TrajectoryRequests, tokens: Tokens, parameters: Mapping[str, Any]) -> SamplingParams:
    if unknown := sorted(parameters.keys() - _SAMPLING_FIELDS - _TEXT_FIELDS):
        raise HookError(
            f"sampling_params of a request to /generate has {unknown[0]}, which this engine does not know; leave it "
            f"out."
        )
    values: dict[str, Any] = {k: v for k, v in parameters.items() if k in _SAMPLING_FIELDS and v is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    values |= {name: tuple(values[name]) for name in ("stop", "stop_token_ids") if name in values}
    # Each further request of a trajectory gets its own seed.
    return replace(trajectory.sampling, seed=trajectory.make_seed(tokens), **values)


def _format_reply(
    trajectory: TrajectoryRequests, tokens: Tokens, completion: Completion, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    ids = [int(token) for span in completion.spans for token in span.tokens]
    logprobs = [float(p) for span in completion.spans if span.logprobs is not None for p in span.logprobs]
    text_ids = ids
    if completion.finish_reason == "stop" and not parameters.get("no_stop_trim", False) and ids:
        ends = {*trajectory.sampling.stop_token_ids, trajectory.run.tokenizer().eos_token_id}
        text_ids = ids[:-1] if ids[-1] in ends else ids
    skip = bool(parameters.get("skip_special_tokens", True))
    versions = [span.version.number for span in completion.spans if span.version is not None]
    counts = completion.speculation
    drafts = {} if counts is None else _format_speculation(counts)
    return {
        "text": trajectory.run.tokenizer().decode(text_ids, skip_special_tokens=skip),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": completion.finish_reason},
            "prompt_tokens": len(tokens),
            "completion_tokens": len(ids),
            "cached_tokens": completion.cached_tokens,
            "weight_version": str(versions[-1]) if versions else "0",
            "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, ids, strict=True)],
            **drafts,
        },
    }


def _format_speculation(counts: SpeculationCounts) -> dict[str, float]:
    return {
        "spec_verify_ct": counts.verifications,
        "spec_accept_token_num": counts.accepted,
        "spec_draft_token_num": counts.drafted,
        "spec_accept_rate": counts.accept_rate,
        "spec_accept_length": counts.accept_length,
    }


class GenerateState:
    """The state upstream's generate functions share: the checkpoint's tokenizer and the sampling parameters.

    Within one trajectory, or one rollout function, all have the same.
    """

    args: Any
    aborted: bool

    def __new__(cls, args: Any) -> GenerateState:
        requests = get_requests("GenerateState")
        if requests.state is None:
            requests.state = super().__new__(cls)
            requests.state._fill(requests, args)
        return requests.state

    def _fill(self, requests: TrajectoryRequests, args: Any) -> None:
        self.args = args
        self.tokenizer = requests.run.tokenizer()
        self.processor = None
        self.sampling_params = sampling_params_dict(requests.sampling)
        self.semaphore = asyncio.Semaphore(_MAX_INPUTS)  # the engine and the run's limiter bound what runs at once
        self.dp_rank = 0
        self.reset()

    def reset(self) -> None:
        """Begin a rollout."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Future[Any]] = set()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of a request: the run's router chooses it."""
        yield self.dp_rank
