"""Training loop: takes requests of all tenants from the fair queue, and computes those that fit in one pass together.

Requests of one run are computed in the order of their sequence numbers. Of what was taken, the data of all runs up to
their next update is one pass; updates, saves and loads follow, then the data behind them.

Every pass is a record of the journal with the parts it had. A restarted service computes the same passes again from
the last saved adapters, and gets the same bits, as a pass is a function of its parts and their adapters.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles.backends.service.adapter import AdamParams, Adapter, AdapterShape
from miles.backends.service.checkpoint_files import CheckpointFiles
from miles.backends.service.config import ServiceConfig
from miles.backends.service.fair_queue import FairQueue
from miles.backends.service.journal import Record
from miles.backends.service.messages import TrainRequest, decode_train_request, encode_array_record
from miles.backends.service.state import FOLDERS, ServiceRequest
from miles.backends.service.store import ServiceStore
from miles.backends.service.tenants import TenantKeys
from miles.backends.service.trainer import MultiLoraTrainer, PassItem, PassOutput, split_data
from miles.cluster.executor import Executor
from miles.core.errors import MilesError
from miles.rollout.serving.errors import RequestError

__all__ = ["TrainingCounts", "TrainingLoop"]

_LOG = logging.getLogger("miles.service")
TRAIN = "forward_backward"
Effect = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class TrainingCounts:
    """What the loop has done since the start."""

    passes: int = 0
    parts: int = 0
    tokens: int = 0
    shared_passes: int = 0
    updates: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """A part of a training request, or a whole request of another kind (``part`` is None)."""

    request: ServiceRequest
    part: int | None = None
    tokens: int = 1
    is_last: bool = True


class TrainingLoop:
    """The loop, and the adapters in training, which only the trainer's thread touches."""

    def __init__(
        self,
        trainer: MultiLoraTrainer,
        store: ServiceStore,
        files: CheckpointFiles,
        tenants: TenantKeys,
        config: ServiceConfig,
        run: Executor,
        forget_version: Callable[[str], None] = lambda folder: None,
    ) -> None:
        self.counts = TrainingCounts()
        self._forget_version = forget_version
        self._trainer = trainer
        self._store = store
        self._files = files
        self._tenants = tenants
        self._config = config
        self._run = run
        self._queue: FairQueue[_Work] = FairQueue(config.service_quantum)
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._dirty: set[str] = set()
        self._decoded: dict[str, tuple[TrainRequest, list[range]]] = {}
        self._waiting: dict[str, dict[int, ServiceRequest]] = {}
        self._next: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._executing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    # -- requests ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, request: ServiceRequest) -> None:
        """Queue an accepted request; it waits for the requests of its run with lower sequence numbers."""
        if request.kind == "create_model":
            self._put_ready(request)
            return
        run = self._store.state.runs[request.target]
        waiting = self._waiting.setdefault(run.id, {})
        waiting[request.seq] = request
        expected = self._next.setdefault(run.id, run.next_seq)
        while expected in waiting:
            self._put_ready(waiting.pop(expected))
            expected += 1
        self._next[run.id] = expected

    async def drop_waiting(self, run_id: str) -> None:
        """End the requests of a run that wait for one that never came."""
        for request in list(self._waiting.pop(run_id, {}).values()):
            message = f"request {self._next[run_id]} of the run never came, and its session has ended."
            await self._fail(request, RequestError(message, status=422))

    def _put_ready(self, request: ServiceRequest) -> None:
        if request.kind == TRAIN and "refused" not in request.content:
            decoded, parts = self._decode(request.id, request.body)
            for number in range(len(request.parts), len(parts)):
                tokens = sum(len(decoded.data[i].tokens_N) for i in parts[number])
                work = _Work(request, number, tokens, number == len(parts) - 1)
                self._queue.put(request.tenant, work, tokens)
        else:
            self._queue.put(request.tenant, _Work(request), 1)
        self._wake.set()

    def _decode(self, request_id: str, body: bytes) -> tuple[TrainRequest, list[range]]:
        if request_id not in self._decoded:
            decoded = decode_train_request(body)
            self._decoded[request_id] = decoded, split_data(decoded.data, self._config.service_batch_tokens)
        return self._decoded[request_id]

    # -- the loop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start to compute."""
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Stop after what is computed now."""
        if self._task is not None:
            self._task.cancel()
            running = [task for task in (self._task, self._executing) if task is not None]
            for result in await asyncio.gather(*running, return_exceptions=True):
                self._failure = result if isinstance(result, Exception) else self._failure
            self._task = self._executing = None

    @property
    def error(self) -> BaseException | None:
        """What ended the loop, if something did."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return self._failure
        return self._task.exception()

    async def _loop(self) -> None:
        while True:
            if not len(self._queue):
                self._wake.clear()
                await self._wake.wait()
                await asyncio.sleep(self._config.service_coalesce_seconds)
            works = self._queue.take(self._config.service_batch_tokens)
            self._executing = asyncio.create_task(self._execute(works))
            await asyncio.shield(self._executing)
            if self._store.journal.size > self._config.service_snapshot_mib << 20:
                await self.snapshot()

    async def _execute(self, works: Sequence[_Work]) -> None:
        for together, single in _order_works(works):
            if together:
                await self._run_pass(together)
            for work in single:
                await self._run_single(work.request)

    async def _run_pass(self, works: Sequence[_Work]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        results = await self._run(lambda: self._compute_separately(works))
        for passed, outputs in results:
            if isinstance(outputs, Exception):
                await self._fail(passed[0].request, outputs)
                continue
            bodies = [encode_array_record(output.outputs) for output in outputs]
            parts = [
                [work.request.id, work.part, output.loss, len(body), work.is_last]
                for work, output, body in zip(passed, outputs, bodies, strict=True)
            ]
            await self._store.commit(Record("pass", {"parts": parts}, b"".join(bodies)))
            self._count(passed)
        for work in works:
            if work.is_last:
                self._decoded.pop(work.request.id, None)
        self.counts.seconds += loop.time() - started

    def _count(self, works: Sequence[_Work]) -> None:
        self.counts.passes += 1
        self.counts.parts += len(works)
        self.counts.tokens += sum(work.tokens for work in works)
        self.counts.shared_passes += len({work.request.tenant for work in works}) > 1

    def _compute_separately(self, works: Sequence[_Work]) -> list[tuple[Sequence[_Work], list[PassOutput] | Exception]]:
        """Compute one pass; if it fails, one for each part, so that nobody's data fails the request of another."""
        works = [work for work in works if work.request.is_pending]
        try:
            return [(works, self._compute_pass([(work.request, work.part) for work in works]))] if works else []
        except Exception as error:
            if len(works) == 1:
                _LOG.warning("a training request failed", exc_info=error)
                return [(works, error)]
        return [result for work in works for result in self._compute_separately([work])]

    def _compute_pass(self, parts: Sequence[tuple[ServiceRequest, int | None]]) -> list[PassOutput]:
        items: list[PassItem] = []
        for request, part in parts:
            assert part is not None
            decoded, ranges = self._decode(request.id, request.body)
            items.append(
                PassItem(
                    adapter=self._get_adapter(request.target, keep={each.target for each, _ in parts}),
                    data=[decoded.data[i] for i in ranges[part]],
                    loss_fn=decoded.loss_fn,
                    loss_config=decoded.loss_config,
                    backward=not decoded.forward_only,
                )
            )
        outputs = self._trainer.run(items)
        self._dirty |= {request.target for (request, _), item in zip(parts, items, strict=True) if item.backward}
        return outputs

    # -- updates, saves and loads -----------------------------------------------------------

    async def _run_single(self, request: ServiceRequest) -> None:
        if not request.is_pending:
            return
        try:
            json, effects = await self._run(lambda: self._compute_single(request))
        except Exception as error:
            await self._fail(request, error)
            return
        self.counts.updates += request.kind == "optim_step"
        await self._store.commit(Record("result", {"id": request.id, "json": json, "effects": effects}))
        for kind, effect in effects:
            if kind == "checkpoint_removed":
                self._forget_version(effect["folder"])

    async def _fail(self, request: ServiceRequest, error: Exception) -> None:
        """End a request with an error: a sentence of ours, or of any other error only its type."""
        is_user = isinstance(error, RequestError) and error.status < 500
        if isinstance(error, MilesError):
            message = str(error)
        else:
            _LOG.error("%s failed", request.kind, exc_info=error)
            message = f"the server failed on this request ({type(error).__name__}); see its log."
        content = {"id": request.id, "error": message, "category": "user" if is_user else "server"}
        await self._store.commit(Record("result", content))
        self._decoded.pop(request.id, None)

    def _compute_single(self, request: ServiceRequest) -> tuple[dict[str, Any], list[Effect]]:
        content = request.content
        if "refused" in content:
            raise RequestError(content["refused"], status=422)
        match request.kind:
            case "create_model":
                self._add_adapter(request.target)
                return {"model_id": request.target, "type": "create_model"}, []
            case "optim_step":
                metrics = self._get_adapter(request.target).step(AdamParams(**content["params"]))
                self._dirty.add(request.target)
                return {"metrics": metrics, "type": "optim_step"}, []
            case "load_weights":
                return self._load(request)
            case "unload_model":
                self._adapters.pop(request.target, None)
                return {"model_id": request.target, "type": "unload_model"}, [("run_unloaded", {"id": request.target})]
            case _:
                return self._save(request)

    def _load(self, request: ServiceRequest) -> tuple[dict[str, Any], list[Effect]]:
        state, content = self._store.state, request.content
        checkpoint = state.find_checkpoint(request.tenant, content["path"], request.time)
        adapter = self._get_adapter(request.target)
        own, other = AdapterShape(**checkpoint.shape), adapter.shape
        if not own.has_same_targets(other):
            raise RequestError(
                f"{checkpoint.path} has rank {own.rank} and other targets than this run, which has rank {other.rank}; "
                "create the run with those of the checkpoint.",
                status=422,
            )
        self._load_folder(request.target, checkpoint.folder, optimizer=content["optimizer"])
        loaded = {"folder": checkpoint.folder, "optimizer": content["optimizer"]}
        json = {"path": checkpoint.path, "model_id": request.target, "type": "load_weights"}
        return json, [("loaded", loaded)]

    def _load_folder(self, run_id: str, folder: str, *, optimizer: bool) -> None:
        self._files.load(self._get_adapter(run_id), folder, optimizer=optimizer)
        self._dirty.add(run_id)

    def _save(self, request: ServiceRequest) -> tuple[dict[str, Any], list[Effect]]:
        state, content = self._store.state, request.content
        run, adapter = state.runs[request.target], self._get_adapter(request.target)
        quota = self._tenants.quotas[request.tenant]
        if state.count_stored_bytes(request.tenant) >= quota.max_stored_bytes:
            raise RequestError(
                f"the tenant's checkpoints have {quota.max_stored_bytes} bytes, all it may store; delete some.",
                status=422,
            )
        kind, name = content["kind"], content["name"]
        path = f"tinker://{run.id}/{FOLDERS[kind]}/{name}"
        if path in state.checkpoints and not content.get("overwrite"):
            raise RequestError(f"there is a checkpoint {path} already; choose another name.", status=422)
        folder, size = self._files.write(adapter, kind, name)
        ttl = content.get("ttl_seconds")
        saved = {
            "path": path,
            "tenant": request.tenant,
            "run_id": run.id,
            "kind": kind,
            "name": name,
            "time": self._store.clock(),
            "size": size,
            "folder": folder,
            "user_metadata": content.get("user_metadata"),
            "expires": None if ttl is None else self._store.clock() + ttl,
            "ephemeral": content.get("sampler") is not None,
            "shape": run.shape,
            "base_model": run.base_model,
        }
        effects: list[Effect] = [("checkpoint", saved)]
        if content.get("sampler") is None:
            return {"path": path, "type": request.kind}, effects
        sampler = {"id": content["sampler"], "tenant": request.tenant, "session_id": run.session_id, "path": path}
        effects += [("sampler", sampler), *self._drop_old_versions(run.id)]
        return {"sampling_session_id": content["sampler"], "type": request.kind}, effects

    def _drop_old_versions(self, run_id: str) -> Iterable[Effect]:
        """Remove the oldest versions that samplers without a name use, so that there are not too many."""
        own = [each for each in self._store.state.checkpoints.values() if each.run_id == run_id and each.ephemeral]
        own.sort(key=lambda checkpoint: checkpoint.time)
        for checkpoint in own[: max(0, len(own) + 1 - self._config.service_sampler_versions)]:
            yield "checkpoint_removed", {"path": checkpoint.path, "folder": checkpoint.folder}

    # -- adapters ---------------------------------------------------------------------------

    def _add_adapter(self, run_id: str) -> Adapter:
        run = self._store.state.runs[run_id]
        adapter = self._adapters[run_id] = self._trainer.create(AdapterShape(**run.shape))
        self._dirty.add(run_id)
        self._evict({run_id})
        return adapter

    def _get_adapter(self, run_id: str, keep: set[str] | None = None) -> Adapter:
        adapter = self._adapters.get(run_id)
        if adapter is None:
            file = self._files.evicted / f"{run_id}.safetensors"
            if not file.exists():
                raise RequestError(f"the run {run_id!r} has ended; create another from a checkpoint.", status=422)
            adapter = self._trainer.create(AdapterShape(**self._store.state.runs[run_id].shape))
            adapter.load(file)
            self._adapters[run_id] = adapter
            self._evict((keep or set()) | {run_id})
        self._adapters.move_to_end(run_id)
        return adapter

    def _evict(self, keep: set[str]) -> None:
        """Move the adapters that were used least recently to disk, if there are too many; ``keep`` are in use."""
        for run_id in list(self._adapters):
            if len(self._adapters) <= self._config.service_max_resident:
                return
            if run_id not in keep:
                self._adapters[run_id].save(self._files.evicted / f"{run_id}.safetensors")
                del self._adapters[run_id]

    def forget(self, run_id: str) -> None:
        """Free the memory of an adapter whose run was unloaded, on the trainer's thread."""
        self._adapters.pop(run_id, None)
        self._dirty.discard(run_id)

    # -- snapshot and recovery --------------------------------------------------------------

    async def snapshot(self) -> None:
        """Save the adapters that changed, and shorten the journal to what follows. Nothing may be computed now."""
        state = self._store.state

        async def prepare() -> None:
            live = [run.id for run in state.runs.values() if not run.unloaded]
            changed = [run_id for run_id in live if run_id in self._dirty]
            files = await self._run(lambda: {run_id: self._save_adapter(run_id) for run_id in changed})
            for run_id, file in files.items():
                state.apply(Record("adapter", {"run": run_id, "file": file}))

        await self._store.compact(prepare)
        self._dirty.clear()
        checkpoints, adapters = list(state.checkpoints.values()), list(state.adapters.values())
        await self._run(lambda: self._files.remove_unused(checkpoints, adapters))

    def _save_adapter(self, run_id: str) -> str:
        return self._files.save_adapter(self._get_adapter(run_id))

    def replay(self, records: Iterable[Record]) -> None:
        """Compute again what the journal says was computed since adapters were saved; then queue what was not.

        The adapters of runs that ended since take part, too: a pass is the same only with all its parts.
        """
        requests: dict[str, ServiceRequest] = {}
        state = self._store.state
        for record in records:
            content = record.content
            if record.kind == "adapter":
                run = state.runs[content["run"]]
                adapter = self._adapters[run.id] = self._trainer.create(AdapterShape(**run.shape))
                adapter.load(self._files.adapters / content["file"])
            elif record.kind == "request":
                kept = {name: content[name] for name in ("id", "tenant", "kind", "target", "seq", "content", "time")}
                own = len(record.body) - sum(content.get("part_sizes", ()))
                requests[content["id"]] = ServiceRequest(**kept, body=record.body[:own])
            elif record.kind == "pass":
                self._compute_pass([(requests[request_id], part) for request_id, part, *_ in content["parts"]])
            elif record.kind == "result" and not content.get("error"):
                self._replay_single(requests[content["id"]], content.get("effects", ()))
        for run in state.runs.values():
            if run.unloaded:
                self.forget(run.id)
        self._decoded.clear()
        for request in list(state.requests.values()):
            if request.is_pending and request.kind != "sample":
                self.put(request)

    def _replay_single(self, request: ServiceRequest, effects: Iterable[Effect]) -> None:
        """Compute a request again without what it wrote: its checkpoints are there."""
        if request.kind == "create_model":
            self._add_adapter(request.target)
        elif request.kind == "optim_step":
            self._compute_single(request)
        for kind, effect in effects:
            if kind == "loaded":
                self._load_folder(request.target, effect["folder"], optimizer=effect["optimizer"])


def _order_works(works: Sequence[_Work]) -> Iterable[tuple[list[_Work], list[_Work]]]:
    """Yield what is computed in one pass, and what follows it one by one, so that each run keeps its order."""
    levels: dict[str, tuple[int, bool]] = {}
    passes: dict[int, tuple[list[_Work], list[_Work]]] = {}
    for work in works:
        is_part = work.part is not None
        level, was_part = levels.get(work.request.target, (0, True))
        level += not was_part and is_part
        levels[work.request.target] = level, is_part
        passes.setdefault(level, ([], []))[0 if is_part else 1].append(work)
    return [passes[level] for level in sorted(passes)]
