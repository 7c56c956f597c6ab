"""The native engine: continuous batching with overlap scheduling; requests in, versioned tokens out.

Who waits for whom: a ``RequestOutput`` waits for the step loop, one task that lives while there is work, which runs
steps and notifies outputs; pause, abort, sleep and wake wait for ``_step_lock`` between two steps. A weight update may
come from another thread, so whoever touches requests or pages also holds ``_lock``.

On a GPU a step is scheduled and launched before the output of the previous one is processed, so that the device does
not wait for the host. Whatever does not fit that order drains all in-flight steps first (``InflightSteps``). Steps
that nobody on the event loop waits for follow each other without returning to it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.forward_batch import ForwardBatch, InflightStep, ScheduledStep
from miles.backends.native.engine.head_draft import DraftHead, HeadDrafter
from miles.backends.native.engine.lora import LoraRegistry, LoraShape, LoraSlotTable, ServedAdapter
from miles.backends.native.engine.memory_budget import (
    count_cached_states,
    resolve_chunk_unit,
    resolve_prefill_chunk,
    resolve_prefill_delay,
)
from miles.backends.native.engine.model_draft import ModelDrafter
from miles.backends.native.engine.prefix_cache import build_page_allocator
from miles.backends.native.engine.req import DecodeFn, Req, RequestOutput
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.engine.running_batch import RunningBatch, TokenRecordStore
from miles.backends.native.engine.scheduler import Scheduler
from miles.backends.native.engine.speculation import Drafter, build_speculation
from miles.backends.native.engine.step_cost import estimate_step_cost
from miles.backends.native.engine.validate import RequestValidator
from miles.backends.native.runner.factory import build_draft_runner, build_runner, get_draft_spec
from miles.cluster.executor import Executor
from miles.cluster.platform import detect_platform
from miles.core.errors import EngineError, UsageError
from miles.core.media import Images
from miles.core.protocols import Completion, OnTokens, SamplingParams
from miles.core.types import Tokens, Version
from miles.kernels.numerics import FAST, Numerics
from miles.models.base import CausalLM
from miles.models.draft.base import Draft
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.indexer_layout import build_indexer_layout
from miles.models.lora.factors import LoraFactors, read_factors
from miles.models.spec import DecoderSpec
from miles.sync.manifest import Manifest

VISION_PREFIX = "vision."
PauseMode = Literal["in_place", "retract", "abort"]

# Seconds that steps may follow each other before the event loop gets a turn.
_MAX_SECONDS_OFF_LOOP = 0.003


class StepLauncher(Protocol):
    """What ``InflightSteps`` needs of a model runner."""

    def launch(self, batch: ForwardBatch) -> InflightStep: ...
    def clear(self) -> None: ...


class InflightSteps:
    """Overlap scheduling: at most ``depth`` steps are in flight when the next one is scheduled.

    ``undelivered`` requests ended, and ``error`` was raised, while a weight update drained the steps; the step loop
    delivers both.
    """

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.steps: list[tuple[ScheduledStep, InflightStep, Version]] = []
        self.undelivered: list[Req] = []
        self.error: Exception | None = None
        self._scheduler = scheduler
        self._depth = depth

    @property
    def pending(self) -> bool:
        """Whether a step is in flight, or a result is undelivered."""
        return bool(self.steps or self.undelivered or self.error)

    def run_step(self, runner: StepLauncher, version: Version) -> list[Req]:
        """Schedule and launch one step, and process what is beyond ``depth``; return the requests that ended."""
        scheduler = self._scheduler
        ended = self.drain() if self.steps and self._must_drain() else []
        if scheduler.must_clear_cache:
            scheduler.preempt_all()
            runner.clear()
            scheduler.must_clear_cache = False
        step = scheduler.schedule_step()
        if step is None:
            return ended + self.drain()
        scheduler.prepare_drafts(step)
        inflight = runner.launch(step.batch)
        scheduler.mark_launched(step)
        self.steps.append((step, inflight, version))
        return ended + self.drain(keep=self._depth)

    def _must_drain(self) -> bool:
        return self._scheduler.must_clear_cache or self._scheduler.must_wait_for_inflight()

    def run_steps(self, runner: StepLauncher, version: Version, may_continue: Callable[[], bool]) -> list[Req]:
        """Run steps while some are in flight, no request ended and ``may_continue()``; return those that ended."""
        ended = self.run_step(runner, version)
        while self.steps and not ended and may_continue():
            ended = self.run_step(runner, version)
        return ended

    def drain(self, keep: int = 0) -> list[Req]:
        """Process the output of all in-flight steps but the last ``keep``; return the requests that ended."""
        ended: list[Req] = []
        while len(self.steps) > keep:
            step, inflight, version = self.steps.pop(0)
            ended += self._scheduler.process_output(step, inflight.result(), version)
        return ended

    def drain_deferred(self) -> None:
        """Process all in-flight steps; leave ended requests and errors for ``take_deferred``."""
        try:
            self.undelivered += self.drain()
        except Exception as error:
            self.error = error

    def take_deferred(self) -> list[Req]:
        """Return the requests that ended in ``drain_deferred``, or raise its error."""
        undelivered, error = self.undelivered, self.error
        self.undelivered, self.error = [], None
        if error is not None:
            raise error
        return undelivered

    def discard(self) -> None:
        self.steps = []
        self.undelivered = []
        self.error = None


class NativeEngine:
    """Implements core.protocols.Engine and EngineControl, and sync.manifest.Receiver.

    With several ``devices``, the first of which is ``device``, the model is tensor-parallel with a rank on each.
    ``draft`` is the draft model or head of --speculative-algorithm. ``lora`` is the room for adapters that requests
    choose by name, which are applied beside the weights. With ``return_indexer_topk`` completions have what the
    indexers of sparse attention selected. Asleep it returns torch's cached memory to the driver if it ``frees_cache``.
    ``_depth`` is the number of steps in flight when the next is launched: by default 1 on a GPU, 0 on a CPU.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        config: NativeConfig,
        run: Executor,
        decode: DecodeFn | None,
        numerics: Numerics = FAST,
        name: str = "engine 0",
        model: CausalLM | None = None,
        devices: Sequence[torch.device] = (),
        draft: CausalLM | Draft | None = None,
        lora: LoraShape | None = None,
        return_indexer_topk: bool = False,
        frees_cache: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        _depth: int | None = None,
    ) -> None:
        self.spec = spec
        self.numerics = numerics
        self.name = name
        self.version: Version | None = None
        self._frees_cache = frees_cache
        device = torch.device(device)
        self._platform = replace(detect_platform(device.type), device=device)
        self.records_indexer_topk = return_indexer_topk and build_indexer_layout(spec) is not None
        self._runner, num_pages, draft_head, self._draft_runner = build_runner(
            spec,
            config,
            self._platform,
            draft,
            dtype=dtype,
            numerics=numerics,
            model=model,
            devices=devices,
            name=name,
            lora=lora,
            return_indexer_topk=return_indexer_topk,
        )
        num_states = count_cached_states(spec, config, dtype) if spec.recurrent else None
        self._pages = build_page_allocator(config, num_pages, num_states)
        running_batch = self._build_running_batch(config, clock, lora)
        self.draft_head = draft if isinstance(draft, Draft) else None
        drafter = self._build_drafter(draft, draft_head, config, running_batch.slots, num_pages, dtype)
        self._runners = [each for each in (self._runner, self._draft_runner) if each is not None]
        self._speculation = build_speculation(spec, config, self._platform, dtype, drafter)
        self._scheduler = self._build_scheduler(config, running_batch, decode)
        self._inflight = InflightSteps(self._scheduler, int(device.type != "cpu") if _depth is None else _depth)
        check, has_tokenizer = self._runner.check_image, decode is not None
        self._validator = RequestValidator(name, spec, self.kv_tokens, check, has_tokenizer=has_tokenizer)
        self.lora = None if lora is None else self._build_lora(lora, running_batch.slots)
        self._weights = self._runner.build_weight_update(name, self._commit_weights)
        self._run = run
        self._clock = clock
        self._init_loop_state()

    def _init_loop_state(self) -> None:
        """Start without requests, in no step, neither paused nor asleep."""
        self._step_seconds = 0.0
        self._outputs: dict[Req, RequestOutput] = {}
        self._waiting_outputs: list[RequestOutput] = []
        self._arrived: list[Req] = []
        self._cancelled: list[Req] = []
        self._loop_task: asyncio.Task[None] | None = None
        self._step_lock = asyncio.Lock()
        self._lock = threading.Lock()
        self._paused = False
        self._asleep = False
        self._closed = False
        self._weights_torn = False

    def _build_running_batch(
        self, config: NativeConfig, clock: Callable[[], float], lora: LoraShape | None
    ) -> RunningBatch:
        lora_slots = None if lora is None else LoraSlotTable(lora.num_slots)
        pages, unrecorded = self._pages, self._runner.empty_records
        max_pages = min(pages.total, -(-self.spec.max_positions // pages.size))
        return RunningBatch(
            pages,
            ReqSlots(config.max_running, max_pages, self.spec.vocab_size, lora_slots),
            share_prefill=config.engine_prefix_cache,
            records={name: TokenRecordStore(none, pages.total, pages.size) for name, none in unrecorded.items()},
            clock=clock,
        )

    def _build_scheduler(self, config: NativeConfig, running_batch: RunningBatch, decode: DecodeFn | None) -> Scheduler:
        runner, platform = self._runner, self._platform
        return Scheduler(
            running_batch,
            prefill_chunk=resolve_prefill_chunk(self.spec, config, platform),
            decode=decode,
            chunk_unit=resolve_chunk_unit(platform, self.numerics),
            prefill_delay=resolve_prefill_delay(config, runner.uses_cuda_graphs, runner.captures_prefill),
            speculation=self._speculation,
            num_draft_states=config.count_draft_states(True) if self.spec.recurrent else None,
        )

    def _build_lora(self, shape: LoraShape, slots: ReqSlots) -> LoraRegistry:
        assert slots.lora is not None
        return LoraRegistry(
            shape=shape,
            host=self._runner,
            slots=slots.lora,
            read=lambda folder: read_factors(folder, self.spec),
            is_used=lambda adapter: any(req.lora is adapter for req in self._iter_reqs()),
        )

    def _build_drafter(
        self,
        draft: CausalLM | Draft | None,
        head: DraftHead | None,
        config: NativeConfig,
        slots: ReqSlots,
        num_pages: int,
        dtype: torch.dtype,
    ) -> Drafter | None:
        """Return the drafts of a ``head``, or of a draft model, which a runner of its own computes."""
        if draft is None:
            return None
        spec = get_draft_spec(draft)
        device = self._platform.device
        cost = estimate_step_cost(spec, self._platform, str(dtype).removeprefix("torch."))
        page_size = config.engine_page_size
        if head is not None:
            return HeadDrafter(
                head,
                slots,
                due_copies=lambda: self._pages.copies,
                cost=cost,
                page_size=page_size,
                num_branches=config.speculative_num_branches,
            )
        assert not isinstance(draft, Draft)
        self._draft_runner = runner = build_draft_runner(draft, config, num_pages=num_pages, device=device, dtype=dtype)
        return ModelDrafter(
            runner,
            slots,
            self._runner.last_tokens_S,
            due_copies=lambda: self._pages.copies,
            cost=cost,
            page_size=page_size,
            vocab_size=min(self.spec.vocab_size, spec.vocab_size),
            num_branches=config.speculative_num_branches,
        )

    def step(self) -> list[Req]:
        """Run one step, or several while nobody waits for output; return the requests that ended."""
        assert self.version is not None
        until = self._clock() + _MAX_SECONDS_OFF_LOOP
        return self._inflight.run_steps(
            self._runner, self.version, lambda: self._may_stay_off_loop() and self._clock() < until
        )

    # -- Engine -----------------------------------------------------------------------------

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        """Continue ``tokens``. Cancelling the caller's task cancels the request."""
        return await self._submit_prompt(tokens, sampling, images).completion()

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        """``generate``, with ``on_tokens`` called with new tokens as they are sampled."""
        async with self._submit_prompt(tokens, sampling, images) as output:
            async for chunk in output:
                on_tokens(chunk.tokens)
            return await output.completion()

    def _submit_prompt(self, tokens: Tokens, sampling: SamplingParams, images: Images) -> RequestOutput:
        if sampling.max_new_tokens == 0:
            raise EngineError(f"{self.name} cannot serve the request: max_new_tokens is 0, must be at least 1")
        return self.submit(GenerateRequest(tokens=tokens, sampling=sampling, images=images))

    def submit(self, request: GenerateRequest) -> RequestOutput:
        """Queue a request, or raise ``EngineError`` if it cannot be served. Call on the event loop."""
        if self._closed:
            raise EngineError(f"{self.name} was closed and takes no more requests")
        self._runner.check()
        if self.version is None:
            raise EngineError(f"{self.name} has no weights yet; publish a version to it first")
        current = None if self.lora is None else self.lora.current
        lora = current if request.lora is None else self._resolve_lora(request.lora)
        req = self._validator.create_req(request, self._clock(), lora)
        req.accepted_drafts = None if self._speculation is None else []
        output = RequestOutput(
            req, self._runner.empty_records, on_wait=self._waiting_outputs.append, on_cancel=self._cancel_output
        )
        self._outputs[req] = output
        self._arrived.append(req)
        self._start_loop()
        return output

    def _cancel_output(self, output: RequestOutput) -> None:
        if self._outputs.pop(output.req, None) is not None:
            self._cancelled.append(output.req)
            output.set_result(EngineError(f"the request to {self.name} was cancelled"))
            self._start_loop()

    # -- EngineControl ----------------------------------------------------------------------

    async def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture all CUDA graphs before the first request; ``on_progress`` gets the number done and the total."""
        async with self._step_lock:
            for runner in self._runners:
                await self._run(lambda runner=runner: runner.warm_up(on_progress))

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Stop stepping. Requests are kept with their pages or (``retract``) without, or aborted."""
        self._paused = True
        async with self._step_lock:
            await self._drain()
            with self._lock:
                for req in list(self._scheduler.running) if mode == "retract" else ():
                    self._scheduler.preempt(req)
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._paused = False
        self._start_loop()

    async def abort(self, rid: str | None = None, message: str = "aborted") -> int:
        """End all requests, or those with this ``rid``, with their tokens so far; return how many."""
        async with self._step_lock:
            await self._drain()
            with self._lock:
                ended = [req for req in self._scheduler.iter_reqs() if rid is None or req.request.rid == rid]
                for req in ended:
                    self._scheduler.remove(req, message)
            self._deliver(ended)
        return len(ended)

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; do nothing and return False while requests hold pages."""
        async with self._step_lock:
            await self._drain()
            with self._lock:
                idle = not self._scheduler.running
                if idle:
                    self._pages.flush()
        return idle

    async def sleep(self) -> None:
        """Release the KV cache memory. Running requests wait and are recomputed after ``wake``."""
        async with self._step_lock:
            await self._drain()
            with self._lock:
                self._asleep = True
                for req in list(self._scheduler.running):
                    self._scheduler.preempt(req)
                self._pages.flush()
            for runner in self._runners:
                runner.free()
            if self._frees_cache:
                self._platform.empty_cache()

    async def wake(self) -> None:
        async with self._step_lock:
            if self._asleep:
                for runner in self._runners:
                    runner.allocate()
                self._asleep = False
        self._start_loop()

    async def health(self) -> Mapping[str, float]:
        self._runner.check()
        return {name: value for name, value in self.read_gauges()[self.name].items() if name != "seconds"}

    def read_gauges(self) -> Mapping[str, Mapping[str, float]]:
        """Return requests, pages and counters by its name; in another thread a RuntimeError means: try again."""
        total, waiting = len(list(self._scheduler.iter_reqs())), len(self._scheduler.waiting)
        gauges = {"running": float(total - waiting), "waiting": float(waiting + len(self._arrived))}
        gauges |= {"free_pages": float(self._pages.available), "pages": float(self._pages.total)}
        return {self.name: {**gauges, **self.stats()}}

    def stats(self) -> Mapping[str, float]:
        """Return the counters since the engine was created, and the seconds spent in steps."""
        counters = {name: float(count) for name, count in asdict(self._scheduler.counters).items()}
        if self._speculation is not None:
            counters |= self._speculation.counters.as_metrics()
        counters |= {**self._runner.graph_counters, "encoded_images": float(self._runner.num_encoded_images)}
        return {**counters, "seconds": self._step_seconds}

    async def close(self) -> None:
        """Reject further requests and fail those in progress. The caller closes the executor ``run``."""
        self._closed = True
        async with self._step_lock:
            self._fail_all(EngineError(f"{self.name} was closed"))
        if self._loop_task is not None:
            await self._loop_task
        self._runner.close()

    @property
    def is_paused(self) -> bool:
        """Whether no steps run now: paused, asleep, or during an in-place weight write."""
        return self._paused or self._asleep or self._weights_torn

    @property
    def is_lost(self) -> bool:
        """Whether the engine can never run another step: it was closed, or one of its ranks died."""
        try:
            self._runner.check()
        except EngineError:
            return True
        return self._closed

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self._pages.total * self._pages.size

    def weights(self) -> Mapping[str, Tensor]:
        """Return the current weights by name."""
        return self._runner.weights()

    def check(self) -> None:
        """Assert that scheduler and pages agree, and that everything is free when there are no requests."""
        with self._lock:
            self._scheduler.check()
            if not (self._outputs or self._cancelled or self._inflight.pending):
                assert not list(self._scheduler.iter_reqs())
                assert self._pages.available == self._pages.total

    # -- Receiver (weight updates) ------------------------------------------------------------

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

    def _commit_weights(
        self, tensors: Mapping[str, Tensor], version: Version, own: Collection[str], changed: Collection[str]
    ) -> None:
        """Switch weights between two steps: running requests keep their KV cache, new ones share none of it.

        A half computed prompt starts again, because its whole response is stamped with the new version. Features of
        images are kept if the vision tower has not changed.
        """
        with self._lock:
            self._inflight.drain_deferred()  # the step loop, not this thread, notifies the callers
            self._runner.set_weights(tensors, own)
            # Which tensors of a transformers module are those of its tower is not known.
            if any(name.startswith(VISION_PREFIX) or isinstance(self.spec, HfAdapterSpec) for name in changed):
                self._runner.clear_features()
            self._set_version(version)

    def write_weights_in_place(self, write: Callable[[], None]) -> None:
        """Overwrite weights by ``write()``. No step runs until ``commit_in_place``, or until new weights commit."""
        with self._lock:
            self._inflight.drain_deferred()
            self._weights_torn = True
            self._weights.forget_committed()
            self._runner.clear_features()
            write()

    def commit_in_place(self, version: Version) -> None:
        """Declare the overwritten weights complete, as ``version``."""
        with self._lock:
            self._set_version(version)

    def _set_version(self, version: Version) -> None:
        self._scheduler.restart_prompts()
        self._pages.flush()
        self.version, self._weights_torn = version, False

    # -- LoRA adapters, from any thread -----------------------------------------------------

    def load_lora(
        self, name: str, factors: LoraFactors, *, pinned: bool = False, folder: Path | None = None
    ) -> ServedAdapter:
        """Add an adapter that requests choose by ``name``; UsageError if it does not fit, or the name is taken.

        ``folder`` is where it can be read again; a ``pinned`` adapter keeps its device slot.
        """
        registry = self._require_lora()
        uid = registry.prepare(factors)
        try:
            with self._lock:
                return registry.load(name, uid, factors.rank, pinned=pinned, folder=folder)
        except UsageError:
            registry.discard(uid)
            raise

    def update_lora(self, name: str, factors: LoraFactors, folder: Path | None = None) -> ServedAdapter:
        """Replace an adapter's factors between two steps, as a weight update does with the weights.

        Its running requests keep their KV cache and go on with the new version, new ones share none of it, and half
        computed prompts start again.
        """
        registry = self._require_lora()
        uid = registry.prepare(factors)
        try:
            with self._lock:
                self._inflight.drain_deferred()
                adapter = registry.update(name, uid, factors.rank, folder)
                self._scheduler.restart_prompts(adapter)
                for req in self._iter_reqs():
                    if req.lora is adapter:
                        req.change_lora_version(adapter.version)
                return adapter
        except UsageError:
            registry.discard(uid)
            raise

    def publish_lora(self, version: Version, factors: LoraFactors, *, keep: int) -> ServedAdapter:
        """Add the adapter of a policy's ``version``, which requests that name none use from now on.

        Requests in flight end with the one that they began with, and the prefix cache is kept. The last ``keep``
        versions stay, so that requests can name them.
        """
        registry = self._require_lora()
        uid = registry.prepare(factors)
        with self._lock:
            adapter = registry.publish(version, uid, factors.rank, keep=keep)
            self.version = version
            return adapter

    def unload_lora(self, name: str) -> ServedAdapter:
        """Remove an adapter; requests that use it end with it."""
        with self._lock:
            return self._require_lora().unload(name)

    def _require_lora(self) -> LoraRegistry:
        if self.lora is None:
            raise UsageError(f"{self.name} serves no LoRA adapters; start it with --enable-lora")
        return self.lora

    def _resolve_lora(self, name: str) -> ServedAdapter:
        try:
            registry = self._require_lora()
        except UsageError as error:
            raise EngineError(str(error)) from error
        adapter = registry.adapters.get(name)
        if adapter is None or adapter.in_host:
            return registry.resolve(name)
        with self._lock:  # reading it again may take the device slot and host memory of another
            return registry.resolve(name)

    def _iter_reqs(self) -> Iterator[Req]:
        """Yield all requests that have not ended, those included that are not queued yet."""
        yield from self._scheduler.iter_reqs()
        yield from list(self._arrived)

    # -- the step loop ----------------------------------------------------------------------

    def _start_loop(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._run_loop())

    async def _run_loop(self) -> None:
        try:
            while True:
                await asyncio.sleep(0)  # let tasks that were started or answered in this turn submit first
                async with self._step_lock:
                    if not self._has_work():
                        return
                    self._deliver(await self._run(self._run_timed_step))
        except Exception as error:
            self._fail_all(error)
        finally:
            self._loop_task = None

    def _has_work(self) -> bool:
        with self._lock:
            self._update_queue()
            work = self._scheduler.running or self._scheduler.waiting or self._inflight.pending
            return bool(work) and not self.is_paused

    def _run_timed_step(self) -> list[Req]:
        with self._lock:
            started = self._clock()
            ended = self._inflight.take_deferred() + self.step()
            self._step_seconds += self._clock() - started
            return ended

    def _may_stay_off_loop(self) -> bool:
        """Return whether the event loop needs no turn before the next step. Called from the step thread."""
        needed = self._arrived or self._cancelled or self._waiting_outputs or self.is_paused or self._closed
        return self._run.is_threaded and not needed

    async def _drain(self) -> None:
        """Holding ``_step_lock``: process and deliver all in-flight steps, then update the queue."""
        try:
            self._deliver(await self._run(self._drain_steps) if self._inflight.pending else [])
        except Exception as error:
            self._fail_all(error)
        with self._lock:
            self._update_queue()

    def _drain_steps(self) -> list[Req]:
        with self._lock:
            return self._inflight.take_deferred() + self._inflight.drain()

    def _update_queue(self) -> None:
        """Between two steps: queue new requests and remove cancelled ones."""
        for req in self._arrived:
            self._scheduler.submit(req)
        for req in self._cancelled:
            if not req.finish_kind:
                self._scheduler.remove(req)
        self._arrived, self._cancelled = [], []

    def _deliver(self, ended: list[Req]) -> None:
        """Complete the outputs of ended requests, and wake readers that wait for more tokens."""
        for req in ended:
            output = self._outputs.pop(req, None)
            if output is not None:
                output.set_result()
        self._waiting_outputs[:] = [output for output in self._waiting_outputs if not output.notify()]
        if ended and self.lora is not None and self.lora.has_unloaded:
            with self._lock:
                self.lora.collect()

    def _fail_all(self, error: Exception) -> None:
        """Fail every request, and clear the KV cache, which may be half written."""
        with self._lock:
            self._inflight.discard()
            self._update_queue()
            for req in list(self._scheduler.iter_reqs()):
                self._scheduler.remove(req)
            self._pages.flush()
            if self.lora is not None:
                self.lora.slots.forget_contents()
            self._runner.clear()
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            output.set_result(error)
        self._waiting_outputs.clear()
