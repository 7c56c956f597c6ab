"""The native engine: requests in, stamped tokens out, one step at a time.

Who waits for whom: ``generate`` waits for its future; the pump, one task that lives while there is work,
steps and settles futures; pause, abort, sleep and wake wait for the step in flight (``_turn``). A weight
flip may come from another thread, so whoever touches requests or pages holds ``_lock`` as well.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.cache import Pages
from miles.backends.native.config import NativeConfig
from miles.backends.native.request import Decode, Seats, Sequence, tail_of
from miles.backends.native.runner import Runner
from miles.backends.native.sampler import draw, manner_of
from miles.backends.native.scheduler import Scheduler
from miles.backends.native.weights import Weights
from miles.cluster.local import Run
from miles.cluster.platform import Platform, find
from miles.core.errors import EngineError, UsageError
from miles.core.protocols import Completion, Sampling
from miles.core.types import Array, Tokens, Version
from miles.models.door import Model
from miles.models.footprint import kv_bytes_per_token, state_bytes_per_sequence
from miles.models.spec import DecoderSpec
from miles.sync.manifest import Manifest


class NativeEngine:
    """Implements core.protocols.Engine and EngineControl, and sync.manifest.Receiver."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        config: NativeConfig,
        run: Run,
        decode: Decode | None,
        name: str = "engine 0",
        model: Model | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec
        self.name = name
        self.version: Version | None = None
        device = torch.device(device)
        self._platform = replace(find(device.type), device=device)
        size = config.engine_page_size
        total = _capacity(spec, config, self._platform, dtype) // size
        longest = min(total, -(-spec.max_positions // size))
        self._runner = Runner(
            spec,
            pages=total,
            page_size=size,
            seats=config.engine_max_running,
            record_routing=config.engine_record_routing,
            device=device,
            dtype=dtype,
            model=model,
        )
        self._seats = Seats(config.engine_max_running, longest)
        # A state stands at one token: it cannot be found by a prefix, only taken over from who just computed it.
        self._pages = Pages(total, size, share=config.engine_prefix_cache and not spec.recurrent)
        self._scheduler = Scheduler(
            self._pages,
            self._seats,
            prefill_chunk=config.engine_prefill_chunk,
            lead=config.engine_prefix_cache,
            decode=decode,
        )
        self._weights = Weights(name, self._runner.expected(), device, self._adopt)
        self._decode = decode
        self._run = run
        self._clock = clock
        self._seconds = 0.0
        self._numbers = count()
        self._futures: dict[Sequence, asyncio.Future[Completion]] = {}
        self._arrived: list[Sequence] = []
        self._gone: list[Sequence] = []
        self._pump: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._paused = self._asleep = self._closed = False

    # -- the architecture -------------------------------------------------------------------

    def step(self) -> list[Sequence]:
        """The scheduler decides, the runner obeys, the sampler draws, the sequences remember."""
        plan = self._scheduler.plan()
        logits_BV, routed_TLk = self._runner.forward(plan, self._seats.pages_SP)
        tokens, logprobs = draw(logits_BV, manner_of(plan.draws, self._seats))
        assert self.version is not None
        return self._scheduler.absorb(plan, tokens, logprobs, self.version, routed_TLk)

    # -- Engine -----------------------------------------------------------------------------

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        """Continue ``tokens``. Cancelling the caller's task frees what the request held."""
        sequence = self._accept(tokens, sampling)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[sequence] = future
        self._arrived.append(sequence)
        self._start()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(sequence, None) is not None:
                self._gone.append(sequence)
                self._start()
            raise

    # -- EngineControl ----------------------------------------------------------------------

    async def pause(self) -> None:
        """No step after this returns; requests are kept."""
        self._paused = True
        async with self._turn:
            pass

    async def resume(self) -> None:
        self._paused = False
        self._start()

    async def abort(self) -> None:
        """End every request with what it has."""
        async with self._turn:
            with self._lock:
                self._settle()
                ended = list(self._scheduler.everyone())
                for sequence in ended:
                    self._scheduler.remove(sequence)
            for sequence in ended:
                self._answer(sequence)

    async def sleep(self) -> None:
        """Give the cache's memory back. Requests that run wait, and are computed anew after ``wake``."""
        async with self._turn:
            with self._lock:
                self._settle()
                self._asleep = True
                for sequence in list(self._scheduler.running):
                    self._scheduler.preempt(sequence)
                self._pages.flush()
            self._runner.free()
            self._platform.give_back()

    async def wake(self) -> None:
        async with self._turn:
            if self._asleep:
                self._runner.allocate()
                self._asleep = False
        self._start()

    async def health(self) -> Mapping[str, float]:
        everyone = list(self._scheduler.everyone())
        waiting = len(self._scheduler.waiting) + len(self._arrived)
        return {
            "running": float(len(everyone) - len(self._scheduler.waiting)),
            "waiting": float(waiting),
            "free_pages": float(self._pages.available),
            "pages": float(self._pages.total),
            **{name: value for name, value in self.stats().items() if name != "seconds"},
        }

    def stats(self) -> Mapping[str, float]:
        """What was done since the engine was made, and how long steps took together."""
        done = self._scheduler.counters
        return {
            "steps": float(done.steps),
            "prefilled_tokens": float(done.prefilled_tokens),
            "cached_tokens": float(done.cached_tokens),
            "generated_tokens": float(done.generated_tokens),
            "preemptions": float(done.preemptions),
            "seconds": self._seconds,
        }

    async def close(self) -> None:
        """Refuse further requests and fail those under way. ``run`` is its maker's to close."""
        self._closed = True
        async with self._turn:
            self._fail(EngineError(f"{self.name} was closed"))
        if self._pump is not None:
            await self._pump

    # -- Receiver ---------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        self._weights.begin(manifest)

    def receive(self, name: str, tensor: Tensor) -> None:
        self._weights.receive(name, tensor)

    def verify(self) -> None:
        self._weights.verify()

    def commit(self) -> None:
        self._weights.commit()

    def rollback(self) -> None:
        self._weights.rollback()

    def _adopt(self, tensors: Mapping[str, Tensor], version: Version) -> None:
        """Between two steps: requests under way keep their keys and values, new ones share none of an older version.

        A prompt that is half computed starts again: all of its answer is going to be stamped with the new version.
        """
        with self._lock:
            self._scheduler.restart_prompts()
            self._runner.adopt(tensors)
            self._pages.flush()
            self.version = version

    # -- the pump ---------------------------------------------------------------------------

    def _start(self) -> None:
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)  # let whoever was started or answered in this turn submit first
                async with self._turn:
                    if not self._due():
                        return
                    for sequence in await self._run(self._timed):
                        self._answer(sequence)
        except Exception as error:
            self._fail(error)
        finally:
            self._pump = None

    def _due(self) -> bool:
        """Is there a step to make?"""
        with self._lock:
            self._settle()
        return not (self._paused or self._asleep) and bool(self._scheduler.running or self._scheduler.waiting)

    def _timed(self) -> list[Sequence]:
        with self._lock:
            started = self._clock()
            ended = self.step()
            self._seconds += self._clock() - started
            return ended

    def _settle(self) -> None:
        """Between two steps: take in who came, let go of who left."""
        for sequence in self._arrived:
            self._scheduler.submit(sequence)
        for sequence in self._gone:
            if not sequence.reason:
                self._scheduler.remove(sequence)
        self._arrived, self._gone = [], []

    def _answer(self, sequence: Sequence) -> None:
        future = self._futures.pop(sequence, None)
        if future is not None and not future.done():
            future.set_result(sequence.completion(self._runner.none_expert))

    def _fail(self, error: Exception) -> None:
        """Everyone is told; the cache, half written maybe, starts over."""
        with self._lock:
            self._settle()
            for sequence in list(self._scheduler.everyone()):
                self._scheduler.remove(sequence)
            self._pages.flush()
            self._runner.clear()
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(error)

    # -- the gate ---------------------------------------------------------------------------

    def _accept(self, tokens: Tokens, sampling: Sampling) -> Sequence:
        """Refuse what can never be served; one sentence says why."""
        if self._closed:
            raise EngineError(f"{self.name} was closed and takes no more requests")
        if self.version is None:
            raise EngineError(f"{self.name} has no weights yet; publish a version to it first")
        prompt = np.asarray(tokens)
        problem = self._misfit(prompt, sampling) or _oddity(sampling)
        if problem is None and sampling.stop and self._decode is None:
            problem = "stop strings need a tokenizer, and this engine was made without one; use stop_token_ids"
        if problem is not None:
            raise EngineError(f"{self.name} cannot serve the request: {problem}")
        eos = () if sampling.ignore_eos else self.spec.eos_token_ids
        return Sequence(
            number=next(self._numbers),
            prompt_length=len(prompt),
            key=prompt.astype(np.int64).tobytes(),
            sampling=sampling,
            ends=frozenset((*eos, *sampling.stop_token_ids)),
            tail=tail_of(sampling.stop),
            tokens=prompt.tolist(),
        )

    def _misfit(self, prompt: Array, sampling: Sampling) -> str | None:
        if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind not in "iu":
            return f"a prompt is a non-empty list of tokens, not {prompt.dtype} of shape {prompt.shape}"
        least, most, longest = int(prompt.min()), int(prompt.max()), len(prompt) + sampling.max_new_tokens
        if least < 0 or most >= self.spec.vocab_size:
            return f"token {least if least < 0 else most} is outside the vocabulary of {self.spec.vocab_size}"
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens is {sampling.max_new_tokens}, must be at least 1"
        capacity = self._pages.total * self._pages.size
        if longest <= min(self.spec.max_positions, capacity):
            return None
        asked = f"{len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens}"
        if longest > self.spec.max_positions:
            return f"{asked} exceed the model's {self.spec.max_positions} positions"
        return f"{asked} exceed the key-value cache of {capacity} tokens; raise --engine-kv-tokens"


def _oddity(sampling: Sampling) -> str | None:
    if not 0 <= sampling.temperature < float("inf"):
        return f"temperature is {sampling.temperature}, must be 0 (greedy) or more"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}, must be above 0 and at most 1"
    if sampling.top_k != -1 and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}, must be -1 (off) or at least 1"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}, must be between 0 and 1"
    if "" in sampling.stop:
        return "a stop string is empty"
    return None


def _capacity(spec: DecoderSpec, config: NativeConfig, platform: Platform, dtype: torch.dtype) -> int:
    """Tokens the cache holds: as asked, or all that can run at once within half of the free memory."""
    size = config.engine_page_size
    if min(size, config.engine_max_running, config.engine_prefill_chunk) < 1:
        raise UsageError("--engine-page-size, --engine-max-running and --engine-prefill-chunk must be at least 1")
    if config.engine_kv_tokens is not None:
        if config.engine_kv_tokens < size:
            raise UsageError(f"--engine-kv-tokens {config.engine_kv_tokens} is less than one page of {size} tokens")
        return config.engine_kv_tokens
    kind = str(dtype).removeprefix("torch.")
    room = platform.free_bytes() // 2
    states = config.engine_max_running * state_bytes_per_sequence(spec, kind)
    if states > room:
        raise UsageError(
            f"the states of --engine-max-running {config.engine_max_running} requests take {states / 2**30:.1f} GiB, "
            f"half of the free memory is {room / 2**30:.1f} GiB; lower --engine-max-running"
        )
    fits = (room - states) // max(1, kv_bytes_per_token(spec, kind))
    return max(size, min(fits, config.engine_max_running * (-(-spec.max_positions // size) * size)))
