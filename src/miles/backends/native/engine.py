"""The native engine: requests in, stamped tokens out, one step at a time.

Who waits for whom: an ``Answer`` waits for the pump, one task that lives while there is work, which steps and tells
answers; pause, abort, sleep and wake wait for the pump's turn (``_turn``). A weight flip may come from another
thread, so whoever touches requests or pages holds ``_lock`` as well.

On an accelerator a step is planned and launched before the one before it has landed, so that the device need not
wait for the host. Whatever does not fit that order lets everything land first (``Flights``). Steps that nobody on the
event loop waits to hear of follow each other without a trip there.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import asdict, replace
from typing import Literal

import torch
from torch import Tensor

from miles.backends.native.answer import Answer
from miles.backends.native.cache import Pages
from miles.backends.native.capacity import prefill_chunk, prefill_patience
from miles.backends.native.config import NativeConfig
from miles.backends.native.flights import Flights
from miles.backends.native.gate import Gate
from miles.backends.native.hall import Hall
from miles.backends.native.request import Ask
from miles.backends.native.routes import Routes
from miles.backends.native.runners import runner_of
from miles.backends.native.scheduler import Scheduler
from miles.backends.native.seats import Seats
from miles.backends.native.sequence import Decode, Sequence
from miles.cluster.local import Run
from miles.cluster.platform import find
from miles.core.errors import EngineError
from miles.core.protocols import Completion, Hear, Sampling
from miles.core.types import Tokens, Version
from miles.models.door import Model
from miles.models.spec import DecoderSpec
from miles.sync.manifest import Manifest

PauseMode = Literal["in_place", "retract", "abort"]

# Seconds that steps may follow each other before whoever came in the meantime is looked after.
_AWAY = 0.003


class NativeEngine:
    """Implements core.protocols.Engine and EngineControl, and sync.manifest.Receiver.

    With several ``devices``, the first of which is ``device``, a rank on each shares the model. ``_depth`` is how many
    steps are in flight when the next is launched; without it 1 on an accelerator, 0 on a CPU.
    """

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
        devices: Items[torch.device] = (),
        clock: Callable[[], float] = time.perf_counter,
        _depth: int | None = None,
    ) -> None:
        self.spec = spec
        self.name = name
        self.version: Version | None = None
        device = torch.device(device)
        self._platform = replace(find(device.type), device=device)
        size, seats = config.engine_page_size, config.engine_max_running
        self._runner, total = runner_of(
            spec, config, self._platform, dtype=dtype, model=model, devices=devices, name=name
        )
        none = self._runner.none_expert
        # A state stands at one token: it cannot be found by a prefix, only taken over from who just computed it.
        self._pages = Pages(total, size, share=config.engine_prefix_cache and not spec.recurrent)
        hall = Hall(
            self._pages,
            Seats(seats, min(total, -(-spec.max_positions // size)), spec.vocab_size),
            lead=config.engine_prefix_cache,
            routes=None if none is None else Routes(none, total, size),
            clock=clock,
        )
        chunk, wait = prefill_chunk(spec, config, self._platform), prefill_patience(config, self._runner.records)
        self._scheduler = Scheduler(hall, prefill_chunk=chunk, decode=decode, patience=wait)
        self._flights = Flights(self._scheduler, int(device.type != "cpu") if _depth is None else _depth)
        self._gate = Gate(name, spec, total * size, decodes=decode is not None)
        self._weights = self._runner.receiver(name, self._adopt)
        self._run = run
        self._clock = clock
        self._seconds = 0.0
        self._answers: dict[Sequence, Answer] = {}
        self._listening: list[Answer] = []
        self._arrived: list[Sequence] = []
        self._gone: list[Sequence] = []
        self._pump: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()
        self._paused = self._asleep = self._closed = self._torn = False

    # -- the architecture -------------------------------------------------------------------

    def step(self) -> list[Sequence]:
        """One step, or some that nobody waits to hear of: ``flights`` tells how; returns the requests that ended."""
        assert self.version is not None
        until = self._clock() + _AWAY
        return self._flights.steps(self._runner, self.version, lambda: self._unwatched() and self._clock() < until)

    # -- Engine -----------------------------------------------------------------------------

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        """Continue ``tokens``. Cancelling the caller's task frees what the request held."""
        return await self._begun(tokens, sampling).completion()

    async def generate_aloud(self, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion:
        """``generate``, with ``hear`` told tokens as they are drawn."""
        async with self._begun(tokens, sampling) as answer:
            async for piece in answer:
                hear(piece.tokens)
            return await answer.completion()

    def _begun(self, tokens: Tokens, sampling: Sampling) -> Answer:
        if sampling.max_new_tokens == 0:
            raise EngineError(f"{self.name} cannot serve the request: max_new_tokens is 0, must be at least 1")
        return self.open(Ask(tokens=tokens, sampling=sampling))

    def open(self, ask: Ask) -> Answer:
        """Take a request in, or refuse it in one sentence (``EngineError``). To be called on the event loop."""
        if self._closed:
            raise EngineError(f"{self.name} was closed and takes no more requests")
        self._runner.check()
        if self.version is None:
            raise EngineError(f"{self.name} has no weights yet; publish a version to it first")
        sequence = self._gate.admit(ask, self._clock())
        answer = Answer(sequence, self._runner.none_expert, listen=self._listening.append, leave=self._part)
        self._answers[sequence] = answer
        self._arrived.append(sequence)
        self._start()
        return answer

    def _part(self, answer: Answer) -> None:
        """Nobody wants this answer any more."""
        sequence = answer.sequence
        if self._answers.pop(sequence, None) is not None:
            self._gone.append(sequence)
            answer.settle(EngineError(f"{self.name} was told to forget the request"))
            self._start()

    # -- EngineControl ----------------------------------------------------------------------

    async def warm_up(self, told: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Record what can be recorded ahead of the first request; ``told`` hears how many are done, and of what."""
        async with self._turn:
            await self._run(lambda: self._runner.warm_up(told))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """No step after this returns. Requests are kept, with their pages or (``retract``) without, or aborted."""
        self._paused = True
        async with self._turn:
            await self._quieten()
            with self._lock:
                for sequence in list(self._scheduler.running) if mode == "retract" else ():
                    self._scheduler.preempt(sequence)
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._paused = False
        self._start()

    async def abort(self, rid: str | None = None, message: str = "aborted") -> int:
        """End every request, or those of one ``rid``, with what they have; returns how many."""
        async with self._turn:
            await self._quieten()
            with self._lock:
                ended = [one for one in self._scheduler.everyone() if rid is None or one.ask.rid == rid]
                for sequence in ended:
                    self._scheduler.remove(sequence, message)
            self._deliver(ended)
        return len(ended)

    async def flush(self) -> bool:
        """Forget every prefix; false, and nothing is done, while requests hold pages."""
        async with self._turn:
            await self._quieten()
            with self._lock:
                if self._scheduler.running:
                    return False
                self._pages.flush()
        return True

    async def sleep(self) -> None:
        """Give the cache's memory back. Requests that run wait, and are computed anew after ``wake``."""
        async with self._turn:
            await self._quieten()
            with self._lock:
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
        self._runner.check()
        everyone, waiting = list(self._scheduler.everyone()), len(self._scheduler.waiting)
        return {
            "running": float(len(everyone) - waiting),
            "waiting": float(waiting + len(self._arrived)),
            "free_pages": float(self._pages.available),
            "pages": float(self._pages.total),
            **{name: value for name, value in self.stats().items() if name != "seconds"},
        }

    def stats(self) -> Mapping[str, float]:
        """What was done since the engine was made, and how long steps took together."""
        counted = {name: float(count) for name, count in asdict(self._scheduler.counters).items()}
        return {**counted, "seconds": self._seconds}

    async def close(self) -> None:
        """Refuse further requests and fail those under way. ``run`` is its maker's to close."""
        self._closed = True
        async with self._turn:
            self._fail(EngineError(f"{self.name} was closed"))
        if self._pump is not None:
            await self._pump
        self._runner.close()

    @property
    def resting(self) -> bool:
        """Whether it makes no steps now: paused, asleep, or with weights that nobody has vouched for."""
        return self._paused or self._asleep or self._torn

    @property
    def lost(self) -> bool:
        """Whether it can never make another step: it was closed, or a rank of it is gone."""
        try:
            self._runner.check()
        except EngineError:
            return True
        return self._closed

    @property
    def kv_tokens(self) -> int:
        """Tokens the key-value cache holds."""
        return self._pages.total * self._pages.size

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors it computes with now, by their names."""
        return self._runner.weights()

    def check(self) -> None:
        """Assert that the books balance; and, when nobody is here, that everything is free."""
        with self._lock:
            self._scheduler.check()
            if not (self._answers or self._gone or self._flights.pending):
                assert not list(self._scheduler.everyone())
                assert self._pages.available == self._pages.total

    # -- Receiver ---------------------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        self._weights.begin(manifest)

    def receive(self, name: str, tensor: Tensor, known: int | None = None, *, own: bool = False) -> None:
        self._weights.receive(name, tensor, known, own=own)

    def verify(self) -> None:
        self._weights.verify()

    def commit(self) -> None:
        self._weights.commit()

    def rollback(self) -> None:
        self._weights.rollback()

    def _adopt(self, tensors: Mapping[str, Tensor], version: Version, own: Collection[str]) -> None:
        """Between two steps: requests under way keep their keys and values, new ones share none of an older version.

        A prompt that is half computed starts again: all of its answer is going to be stamped with the new version.
        """
        with self._lock:
            self._flights.ground_quietly()  # who brings the weights cannot tell those who asked; the pump will
            self._runner.adopt(tensors, own)
            self._renew(version)

    def rewrite(self, write: Callable[[], None]) -> None:
        """Have weights written over where they are. No step is made until they are ``rewritten``, or others come."""
        with self._lock:
            self._flights.ground_quietly()
            self._torn = True
            write()

    def rewritten(self, version: Version) -> None:
        """What was written over is whole, and of ``version``."""
        with self._lock:
            self._renew(version)

    def _renew(self, version: Version) -> None:
        self._scheduler.restart_prompts()
        self._pages.flush()
        self.version, self._torn = version, False

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
                    self._deliver(await self._run(self._timed))
        except Exception as error:
            self._fail(error)
        finally:
            self._pump = None

    def _due(self) -> bool:
        """Is there a step to make, or to be told of?"""
        with self._lock:
            self._settle()
            work = self._scheduler.running or self._scheduler.waiting or self._flights.pending
            return bool(work) and not self.resting

    def _timed(self) -> list[Sequence]:
        with self._lock:
            started = self._clock()
            ended = self._flights.overdue() + self.step()
            self._seconds += self._clock() - started
            return ended

    def _unwatched(self) -> bool:
        """Whether nobody on the event loop wants anything before the next step; asked from the thread that steps."""
        return self._run.apart and not (self._arrived or self._gone or self._listening or self.resting or self._closed)

    async def _quieten(self) -> None:
        """Within a turn: everything lands, everyone is told, who came is taken in and who left let go."""
        try:
            self._deliver(await self._run(self._landed) if self._flights.pending else [])
        except Exception as error:
            self._fail(error)
        with self._lock:
            self._settle()

    def _landed(self) -> list[Sequence]:
        with self._lock:
            return self._flights.overdue() + self._flights.ground()

    def _settle(self) -> None:
        """Between two steps: take in who came, let go of who left."""
        for sequence in self._arrived:
            self._scheduler.submit(sequence)
        for sequence in self._gone:
            if not sequence.reason:
                self._scheduler.remove(sequence)
        self._arrived, self._gone = [], []

    def _deliver(self, ended: list[Sequence]) -> None:
        """Tell those whose answer has ended, and those who wait for more of one."""
        for sequence in ended:
            answer = self._answers.pop(sequence, None)
            if answer is not None:
                answer.settle()
        self._listening[:] = [answer for answer in self._listening if not answer.tell()]

    def _fail(self, error: Exception) -> None:
        """Everyone is told; the cache, half written maybe, starts over."""
        with self._lock:
            self._flights.forget()
            self._settle()
            for sequence in list(self._scheduler.everyone()):
                self._scheduler.remove(sequence)
            self._pages.flush()
            self._runner.clear()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.settle(error)
        self._listening.clear()
