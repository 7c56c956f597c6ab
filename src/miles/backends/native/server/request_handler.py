"""Request lifecycle: tokenize, validate, submit to the engine, cancel when the client disconnects."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import Constraint, GenerateRequest
from miles.backends.native.server.api.grammar import GrammarCache
from miles.backends.native.server.api.images import place_images
from miles.backends.native.server.api.request_types import (
    MAX_TOP_LOGPROBS,
    GrammarRule,
    ParsedRequest,
    PromptInput,
    SessionParams,
)
from miles.backends.native.server.output_state import OutputState
from miles.backends.native.server.sessions import EngineSessions
from miles.core.detokenizer import IncrementalDetokenizer
from miles.core.errors import EngineError
from miles.core.media import Images
from miles.core.types import Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import MAX_TEXT_PER_TOKEN

LONG_TEXT = 1 << 15
"""Characters from which a text is tokenized on a thread, not on the event loop."""


class RWLock:
    """Read-write lock of one event loop: requests hold it for reading, a weight update for writing.

    ``acquire_read`` waits while an update waits or runs; ``acquire_write`` waits until no request runs. A waiting
    update goes before later requests.
    """

    def __init__(self) -> None:
        self._num_readers = 0
        self._num_writers = 0
        self._readable = asyncio.Event()
        self._readable.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._write_lock = asyncio.Lock()

    @asynccontextmanager
    async def acquire_read(self) -> AsyncIterator[None]:
        while not self._readable.is_set():
            await self._readable.wait()
        self._num_readers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._idle.set()

    @asynccontextmanager
    async def acquire_write(self, *, immediate: bool = False) -> AsyncIterator[None]:
        """One writer at a time; ``immediate`` does not wait for the readers."""
        self._num_writers += 1
        self._readable.clear()
        try:
            async with self._write_lock:
                if not immediate:
                    await self._idle.wait()
                yield
        finally:
            self._num_writers -= 1
            if not self._num_writers:
                self._readable.set()

    async def wait_idle(self) -> None:
        """Wait until there is no reader."""
        await self._idle.wait()


class VersionLabels:
    """SGLang's ``weight_version`` strings of our version numbers; a version without a label is its number."""

    def __init__(self, initial: str = "default") -> None:
        self._labels: dict[Version, str] = {}
        self._initial = initial

    def get(self, version: Version | None) -> str:
        if version is None:
            return self._initial
        return self._labels.get(version, self._initial if version.number == 0 else str(version.number))

    def set(self, version: Version, label: str) -> None:
        self._labels[version] = label


class RequestHandler:
    """The running requests of one engine. All of it lives on the event loop."""

    def __init__(
        self,
        engine: NativeEngine,
        tokenizer: HfTokenizer | None,
        labels: VersionLabels,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.labels = labels
        self.lock = RWLock()
        self.draining = False
        self.clock = clock
        self.sessions = EngineSessions(clock)
        self._running: dict[str, OutputState] = {}
        self._grammars: GrammarCache | None = None
        self._decode_token = None
        if tokenizer is not None:
            self._decode_token = lru_cache(1 << 16)(lambda token: tokenizer.decode([token]))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def weight_version(self) -> str:
        """The label of the engine's current weights."""
        return self.labels.get(self.engine.version)

    @asynccontextmanager
    async def submit(self, requests: Sequence[ParsedRequest]) -> AsyncIterator[list[OutputState]]:
        """Submit all requests or none; on exit those that have not ended are cancelled."""
        if self.draining:
            raise RequestError("The server is shutting down and takes no more requests.", status=503)
        if self.engine.version is None:
            raise RequestError("The engine has no weights yet.", status=503)
        start_time = self.clock()
        async with self.lock.acquire_read():
            states: list[OutputState] = []
            try:
                for request, prompt, constraint in await self._prepare(requests):
                    states.append(self._submit_one(request, prompt, constraint, start_time))
                yield states
            finally:
                for state in states:
                    self._running.pop(state.request.rid, None)
                    if state.request.session is not None:
                        self.sessions.finish_request(state.request.session, state.request.rid)
                    state.output.cancel()

    async def wait_finished(self, states: Sequence[OutputState]) -> None:
        """Wait until all have ended."""
        if len(states) == 1:
            await self._wait_one(states[0])
        else:
            await asyncio.gather(*map(self._wait_one, states))

    def find_rids(self, rid: str) -> list[str]:
        """The running requests a client means by ``rid``: that one, or all completions of the request it named so."""
        if rid in self._running:
            return [rid]
        return [name for name in self._running if name.startswith(f"{rid}_") and name[len(rid) + 1 :].isdigit()]

    def count_waiting_tokens(self, num_waiting: int) -> int:
        """Prompt tokens of the last ``num_waiting`` requests, which are those that are not scheduled yet."""
        waiting = list(self._running.values())[max(0, len(self._running) - num_waiting) :] if num_waiting else []
        return sum(len(state.prompt) for state in waiting)

    async def _wait_one(self, state: OutputState) -> None:
        await state.output.completion()
        state.finish(self.clock())

    # -- submitting -------------------------------------------------------------------------

    async def _prepare(
        self, requests: Sequence[ParsedRequest]
    ) -> list[tuple[ParsedRequest, list[int], Constraint | None]]:
        encoded: dict[Any, tuple[list[int], Images]] = {}
        prepared: list[tuple[ParsedRequest, list[int], Constraint | None]] = []
        for request in requests:
            key = (request.prompt, request.image_data, request.image_runs)
            if key not in encoded:
                encoded[key] = await self._encode_with_images(request)
            constraint = None if request.grammar is None else await self._build_constraint(request.grammar)
            prompt, images = encoded[key]
            if request.session is not None:
                if images:
                    raise RequestError("A session's requests take no images.", param="session_params")
                prompt = await self._extend_session(request.session, prompt)
            prepared.append((replace(request, images=images), prompt, constraint))
        return prepared

    async def _encode_with_images(self, request: ParsedRequest) -> tuple[list[int], Images]:
        tokens = await self._encode(request.prompt)
        if not request.image_data:
            return tokens, request.images
        return await asyncio.to_thread(place_images, request, tokens, self.tokenizer)

    async def _extend_session(self, params: SessionParams, tokens: list[int]) -> list[int]:
        replaced = self.sessions.find_replaced(params)
        if replaced is not None:
            await self.engine.abort(replaced, "its session was continued without it")
        bos_token = None if self.tokenizer is None else self.tokenizer.bos_token_id
        return self.sessions.build_prompt(params, tokens, bos_token)

    async def _encode(self, prompt: PromptInput) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("This server has no tokenizer (--skip-tokenizer-init): send input_ids instead of text.")
        if len(prompt) > self.max_text_length:
            message = f"The text has {len(prompt)} characters, far more than the context of {self._max_context} tokens."
            raise RequestError(message)
        if len(prompt) > LONG_TEXT:
            tokens = await asyncio.to_thread(tokenizer.prompt, prompt)
        else:
            tokens = tokenizer.prompt(prompt)
        if not tokens:
            raise RequestError("The prompt is empty, but must have at least one token.")
        return tokens

    async def _build_constraint(self, rule: GrammarRule) -> Constraint:
        if self._grammars is None:
            tokenizer = None if self.tokenizer is None else self.tokenizer.as_json()
            if tokenizer is None:
                raise RequestError(f"{rule.kind} needs a fast tokenizer, and this server has none.", param=rule.kind)
            vocab_size, eos_tokens = self.engine.spec.vocab_size, self._find_eos_tokens()
            self._grammars = await asyncio.to_thread(
                GrammarCache, tokenizer, vocab_size=vocab_size, eos_tokens=eos_tokens
            )
        return await asyncio.to_thread(self._grammars.build_constraint, rule)

    def _find_eos_tokens(self) -> list[int]:
        """The end-of-sequence tokens of the model and of the tokenizer."""
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return list(dict.fromkeys([*self.engine.spec.eos_token_ids, *([] if own is None else [own])]))

    def _submit_one(
        self, request: ParsedRequest, prompt: list[int], constraint: Constraint | None, start_time: float
    ) -> OutputState:
        if request.rid in self._running:
            raise RequestError(f"rid {request.rid!r} is the id of a request that is still running.", param="rid")
        try:
            output = self.engine.submit(self._build_engine_request(request, prompt, constraint))
        except EngineError as error:
            raise RequestError(f"{error}.", status=503 if self.engine.is_lost else 400) from error
        tokenizer, detokenizer = self.tokenizer, None
        if tokenizer is not None:
            decode = tokenizer.text if request.skip_special_tokens else tokenizer.decode
            detokenizer = IncrementalDetokenizer(decode, prompt, request.sampling.stop)
        state = OutputState(
            request,
            prompt,
            output,
            detokenizer=detokenizer,
            decode_token=self._decode_token,
            get_label=self._get_label,
            start_time=start_time,
        )
        self._running[request.rid] = state
        if request.session is not None:
            self.sessions.add_request(request.session, request.rid, prompt, output)
        return state

    def _get_label(self, version: Version | None) -> str:
        """The label of the weights that sampled last; before any token, of the current ones."""
        return self.labels.get(self.engine.version if version is None else version)

    def _build_engine_request(
        self, request: ParsedRequest, prompt: list[int], constraint: Constraint | None
    ) -> GenerateRequest:
        self._check(request, prompt)
        limit, start = request.max_new_tokens, request.logprob_start_len
        stop_token_ids = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:  # the tokenizer's EOS may be missing in the model's config
            model = self.engine.spec.eos_token_ids
            stop_token_ids += tuple(token for token in self._find_eos_tokens() if token not in model)
        return GenerateRequest(
            tokens=np.array(prompt, np.int32),
            sampling=replace(
                request.sampling,
                max_new_tokens=self._max_context - len(prompt) if limit is None else limit,
                stop_token_ids=stop_token_ids,
                seed=_derive_seed(request.seed, request.sample_index),
            ),
            rid=request.rid,
            priority=request.priority,
            logprob_start_len=start if start is not None and start < len(prompt) else None,
            top_logprobs_num=request.top_logprobs_num,
            token_ids_logprob=request.token_ids_logprob,
            constraint=constraint,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=request.logit_bias,
            min_new_tokens=request.min_new_tokens,
            stop_regex=request.stop_regex,
            return_routed_experts=request.routed_experts_start_len is not None,
            images=request.images,
            lora=request.lora,
        )

    @property
    def max_text_length(self) -> int:
        """Characters of the longest text that may fit the context."""
        return MAX_TEXT_PER_TOKEN * self._max_context

    @property
    def _max_context(self) -> int:
        """The most tokens a prompt and its completion may have together."""
        return min(self.engine.spec.max_positions, self.engine.kv_tokens)

    def _check(self, request: ParsedRequest, prompt: list[int]) -> None:
        """Refuse what does not fit the context, the prompt or the vocabulary."""
        context = self._max_context
        vocab_size = self.engine.spec.vocab_size
        length = len(prompt)
        limit = request.max_new_tokens
        if length >= context:
            raise RequestError(f"The prompt has {length} tokens, but the context has room for {context}.")
        if limit is not None and length + limit > context:
            raise RequestError(
                f"The prompt has {length} tokens and {limit} more are requested, but the context has room for "
                f"{context}."
            )
        positions = {
            "sampling_drawn": request.sampling.num_prior_tokens,
            "logprob_start_len": request.logprob_start_len,
            "routed_experts_start_len": request.routed_experts_start_len,
        }
        for name, position in positions.items():
            if position is not None and position > length:
                raise RequestError(f"{name} is {position}, but the prompt has {length} tokens.", param=name)
        if request.return_indexer_topk and not self.engine.records_indexer_topk:
            raise RequestError(
                "This server does not record what indexers select; start it with --engine-return-indexer-topk and a "
                "model with sparse attention.",
                param="return_indexer_topk",
            )
        max_tops = min(vocab_size, MAX_TOP_LOGPROBS)
        if request.top_logprobs_num > max_tops:
            raise RequestError(
                f"{request.top_logprobs_num} top log-probs are requested, but at most {max_tops} are returned."
            )
        for token in (*request.token_ids_logprob, *request.logit_bias, *request.sampling.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise RequestError(f"Token {token} is outside the vocabulary of {vocab_size}.")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            message = f"Token {wrong} of the prompt is outside the vocabulary of {vocab_size}."
            raise RequestError(message, param="input_ids")


def _derive_seed(seed: int | None, sample_index: int) -> int:
    """The seed of a completion: random, or the given one; further samples of a prompt derive theirs from it."""
    if seed is None:
        return secrets.randbits(63)
    if sample_index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {sample_index}".encode(), digest_size=8).digest(), "little")
