"""Sampling of the service: requests of all tenants, admitted in fair turns to one engine that serves all adapters.

The engine applies adapters beside the shared base weights. A sampler's adapter is loaded under the name of its
checkpoint when it is first used; the engine moves adapters between disk, host and device memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from miles.backends.service.checkpoint_files import CheckpointFiles
from miles.backends.service.fair_queue import FairQueue
from miles.backends.service.journal import Record
from miles.backends.service.messages import SampledTokens, TopTokens, encode_sample_result
from miles.backends.service.state import ServiceRequest
from miles.backends.service.store import ServiceStore
from miles.core.errors import EngineError, MilesError, UsageError
from miles.core.protocols import SamplingParams
from miles.rollout.serving.errors import RequestError

__all__ = ["EngineSample", "PromptScores", "SampleQuery", "SamplerEngine", "SamplingCounts", "SamplingLoop"]

_LOG = logging.getLogger("miles.service")
_MAX_RUNNING = 256
_MAX_QUEUED_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """One sequence to sample, from an adapter or the base model, and what to score of the prompt."""

    tokens: Sequence[int]
    sampling: SamplingParams
    adapter: str | None
    score_from: int | None = None
    top_k: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probs of the prompt's tokens from ``first`` on: of themselves, of the most likely, and of named ones."""

    first: int
    logprobs: Sequence[float | None]
    top: Sequence[Sequence[tuple[int, float]]] = ()
    named: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSample:
    """A sampled sequence with its log-probs, and the scores of its prompt."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: Sequence[Sequence[tuple[int, float]]] = ()
    prompt: PromptScores | None = None
    cached_tokens: int = 0


class SamplerEngine(Protocol):
    """What the service needs of an engine. ``max_tokens`` is the most tokens of prompt and response together."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    async def sample(self, query: SampleQuery) -> EngineSample: ...
    def has_adapter(self, name: str) -> bool: ...
    async def load_adapter(self, name: str, folder: Path) -> None: ...
    def unload_adapter(self, name: str) -> None: ...


@dataclass(slots=True)
class SamplingCounts:
    """What was sampled since the start."""

    sequences: int = 0
    tokens: int = 0


class SamplingLoop:
    """Admits sampling requests in fair turns; an ended one makes room for the next."""

    def __init__(self, engine: SamplerEngine, store: ServiceStore, files: CheckpointFiles, quantum: int) -> None:
        self.counts = SamplingCounts()
        self._engine = engine
        self._store = store
        self._files = files
        self._queue: FairQueue[ServiceRequest] = FairQueue(quantum)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    def put(self, request: ServiceRequest) -> None:
        """Queue an accepted request."""
        content = request.content
        cost = len(content["tokens"]) + content["num_samples"] * content["params"]["max_new_tokens"]
        self._queue.put(request.tenant, request, cost)
        self._admit()

    def _admit(self) -> None:
        """Start requests while there is room. Each runs as a task of its own."""
        while not self._is_stopped and len(self._running) < _MAX_RUNNING and len(self._queue):
            (request,) = self._queue.take(_MAX_QUEUED_TOKENS, max_count=1)
            task = asyncio.create_task(self._serve(request))
            self._running[request.id] = task
            task.add_done_callback(self._make_room(request.id))

    def _make_room(self, request_id: str) -> Callable[[asyncio.Task[None]], None]:
        def remove(task: asyncio.Task[None]) -> None:
            self._running.pop(request_id, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                _LOG.error("a sampling request could not be ended", exc_info=error)
            self._admit()

        return remove

    async def cancel(self, request: ServiceRequest) -> None:
        """End a request that nobody waits for any more."""
        if not request.is_pending:
            return
        self._queue.remove(request.tenant, lambda queued: queued.id == request.id)
        if (task := self._running.get(request.id)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if request.is_pending:
            await self._end(request, "the request was cancelled.", is_user=True)

    async def stop(self) -> None:
        """Stop all requests; they are served again after a restart."""
        self._is_stopped = True
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one request ------------------------------------------------------------------------

    async def _serve(self, request: ServiceRequest) -> None:
        try:
            body = await self._sample(request)
        except (EngineError, UsageError, RequestError) as error:
            await self._end(request, str(error).rstrip(".") + ".", is_user=True)
        except MilesError as error:
            await self._end(request, str(error), is_user=False)
        except Exception as error:
            _LOG.error("sampling failed", exc_info=error)
            await self._end(request, f"the server failed on this request ({type(error).__name__}); see its log.")
        else:
            await self._store.commit(Record("result", {"id": request.id}, body))

    async def _end(self, request: ServiceRequest, message: str, *, is_user: bool = False) -> None:
        content = {"id": request.id, "error": message, "category": "user" if is_user else "server"}
        await self._store.commit(Record("result", content))

    async def _sample(self, request: ServiceRequest) -> bytes:
        content = request.content
        adapter = await self._prepare_adapter(request.tenant, content["path"])
        seeds = _derive_seeds(request.id, content["seed"], content["num_samples"])
        ids = tuple(sorted({token for row in content["targets"] or () for token in row if token >= 0}))
        scores = content["score_from"] if content["score_from"] is not None else 0 if ids else None
        queries = [
            SampleQuery(
                tokens=content["tokens"],
                sampling=SamplingParams(**_sampling_options(content["params"]), seed=seed),
                adapter=adapter,
                score_from=scores if number == 0 else None,
                top_k=max(content["top_k"] if number == 0 else 0, content["top_k_sample"]),
                token_ids=ids if number == 0 else (),
            )
            for number, seed in enumerate(seeds)
        ]
        samples = await asyncio.gather(*(self._engine.sample(query) for query in queries))
        self.counts.sequences += len(samples)
        self.counts.tokens += sum(len(sample.tokens) for sample in samples)
        return _encode_samples(content, samples)

    async def _prepare_adapter(self, tenant: str, path: str | None) -> str | None:
        """Load the adapter of a checkpoint, if the engine has it not; returns its name there."""
        if path is None:
            return None
        checkpoint = self._store.state.find_checkpoint(tenant, path, self._store.clock())
        async with self._loading:
            if not self._engine.has_adapter(checkpoint.folder):
                await self._engine.load_adapter(checkpoint.folder, self._files.find(checkpoint))
        return checkpoint.folder

    def forget(self, folder: str) -> None:
        """Unload the adapter of a removed checkpoint."""
        if self._engine.has_adapter(folder):
            self._engine.unload_adapter(folder)


def _sampling_options(params: dict[str, Any]) -> dict[str, Any]:
    return params | {name: tuple(params[name]) for name in ("stop", "stop_token_ids")}


def _derive_seeds(request_id: str, seed: int | None, count: int) -> list[int]:
    """Return a seed for each sequence: of the request's seed, or else of its id, so that a restart samples the same."""
    root = f"{request_id}" if seed is None else f"seed {seed}"
    digests = (sha256(f"{root} {number}".encode()).digest() for number in range(count))
    return [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]


def _encode_samples(content: dict[str, Any], samples: Sequence[EngineSample]) -> bytes:
    k, first = content["top_k_sample"], samples[0].prompt
    length = len(content["tokens"])
    logprobs: list[float | None] | None = None
    top_prompt = targets = None
    if first is not None:
        if content["score_from"] is not None:
            logprobs = [None] * first.first + list(first.logprobs)
            logprobs = [None if i < content["score_from"] else value for i, value in enumerate(logprobs)]
        if content["top_k"] and content["score_from"] is not None:
            rows = [()] * first.first + [row[: content["top_k"]] for row in first.top]
            top_prompt = TopTokens(positions=rows + [()] * (length - len(rows)), k=content["top_k"])
        if content["targets"] is not None:
            named = [{}] * first.first + [dict(row) for row in first.named]
            targets = np.array(
                [
                    [named[i + 1].get(t, 0.0) if t >= 0 else 0.0 for t in row]
                    for i, row in enumerate(content["targets"])
                ],
                np.float32,
            )
    return encode_sample_result(
        [
            SampledTokens(
                tokens=sample.tokens,
                logprobs=sample.logprobs,
                stopped=sample.stopped,
                top=TopTokens(positions=[row[:k] for row in sample.top], k=k) if k else None,
            )
            for sample in samples
        ],
        prompt_logprobs=logprobs,
        top_prompt=top_prompt,
        target_logprobs=targets,
        cached_tokens=samples[0].cached_tokens,
    )
