"""Training service: accepts the requests of tenants, within their quotas, and answers what became of them.

A request is accepted when it is durable: its id is returned, and its result is waited for under that id. The same
request sent again (same run or sampler, same sequence number) has the same id and is computed once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from miles.backends.service.adapter import AdapterShape, get_target_flag
from miles.backends.service.checkpoint_files import CheckpointFiles
from miles.backends.service.config import ServiceConfig
from miles.backends.service.fields import Fields
from miles.backends.service.journal import Record
from miles.backends.service.messages import decode_train_request
from miles.backends.service.requests import (
    build_optim_step,
    build_sample,
    build_save,
    build_shape,
)
from miles.backends.service.sampling import SamplerEngine, SamplingLoop
from miles.backends.service.state import ServiceRequest, ServiceRun, ServiceSampler
from miles.backends.service.store import ServiceStore
from miles.backends.service.tenants import TenantKeys
from miles.backends.service.trainer import MultiLoraTrainer, check_data
from miles.backends.service.training_loop import TRAIN, TrainingLoop
from miles.cluster.executor import Executor
from miles.rollout.serving.errors import RequestError

__all__ = ["TrainingService"]

_SWEEP_SECONDS = 60.0


class TrainingService:
    """One base model, its trainer and its engine, for several tenants. ``folder`` holds all that must survive."""

    def __init__(
        self,
        trainer: MultiLoraTrainer,
        engine: SamplerEngine,
        tenants: TenantKeys,
        *,
        folder: Path,
        base_model: str,
        tokenizer_id: str | None = None,
        config: ServiceConfig,
        run: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        spec = trainer.decoder.spec
        self.base_model = base_model
        self.tokenizer_id = tokenizer_id or base_model
        self.config = config
        self.tenants = tenants
        self.store = ServiceStore(folder, clock=clock)
        self.files = CheckpointFiles(folder, spec, base_model)
        self.sampling = SamplingLoop(engine, self.store, self.files, config.service_quantum)
        self.training = TrainingLoop(trainer, self.store, self.files, tenants, config, run, self.sampling.forget)
        self.trainer = trainer
        self.engine = engine
        self.spec = spec
        self.max_positions = spec.max_positions
        self._run = run
        self._heartbeats: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None

    # -- start and stop ---------------------------------------------------------------------

    async def start(self) -> None:
        """Read the journal, compute again what adapters lost, and go on with the requests that wait."""
        records = self.store.open()
        await self._run(lambda: self.training.replay(records))
        for request in list(self.store.state.requests.values()):
            if request.is_pending and request.kind == "sample":
                self.sampling.put(request)
        self.training.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Stop between two requests and save the adapters; what waits is computed after the next start."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.sampling.stop()
        await self.training.stop()
        if self.problem is None:
            await self.training.snapshot()
        self.store.close()

    async def _sweep(self) -> None:
        """Remove what has expired, once a minute."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await self.remove_expired()

    async def remove_expired(self) -> None:
        """Remove expired checkpoints, and unload the runs of sessions that no client has kept alive."""
        now, state = self.store.clock(), self.store.state
        for checkpoint in [c for c in state.checkpoints.values() if c.expires is not None and c.expires <= now]:
            await self._remove_checkpoint(checkpoint.path)
        limit = self.config.service_session_seconds
        for session in list(state.sessions.values()):
            if not session.ended and now - self._heartbeats.setdefault(session.id, now) > limit:
                await self.end_session(session.tenant, session.id)
        for run in [run for run in state.runs.values() if not run.unloaded and state.sessions[run.session_id].ended]:
            await self.training.drop_waiting(run.id)
            await self._unload_idle([run.id])

    @property
    def problem(self) -> str | None:
        """Why the service cannot go on, if it cannot."""
        error = self.store.journal.error or self.training.error
        return None if error is None else f"the service stopped: {error}"

    # -- sessions ---------------------------------------------------------------------------

    async def create_session(self, tenant: str, fields: Fields) -> str:
        """Create a session; returns its id."""
        session_id = str(uuid4())
        content = {
            "id": session_id,
            "tenant": tenant,
            "time": self.store.clock(),
            "tags": fields.texts("tags"),
            "user_metadata": fields.mapping("user_metadata"),
            "display_name": fields.text("display_name", None),
        }
        await self.store.commit(Record("session", content))
        self._heartbeats[session_id] = self.store.clock()
        return session_id

    def keep_alive(self, tenant: str, session_id: str) -> None:
        """Note that a session's client is there."""
        session = self.store.state.find(self.store.state.sessions, tenant, session_id, "session")
        if session.ended:
            raise RequestError(f"the session {session_id!r} has ended.", status=410)
        self._heartbeats[session_id] = self.store.clock()

    async def end_session(self, tenant: str, session_id: str) -> None:
        """End a session and unload its runs; checkpoints and samplers stay."""
        state = self.store.state
        session = state.find(state.sessions, tenant, session_id, "session")
        if session.ended:
            return
        await self.store.commit(Record("session_ended", {"id": session_id}))
        await self._unload_idle(
            [run.id for run in state.runs.values() if run.session_id == session_id and not run.unloaded]
        )

    async def _unload_idle(self, run_ids: list[str]) -> None:
        """Unload those of the runs for which nothing is left to compute; others are unloaded later."""
        for run_id in run_ids:
            if not self._has_pending(run_id):
                await self.store.commit(Record("run_unloaded", {"id": run_id}))
                await self._run(lambda run_id=run_id: self.training.forget(run_id))

    def _has_pending(self, target: str) -> bool:
        return any(each.target == target and each.is_pending for each in self.store.state.requests.values())

    # -- training ---------------------------------------------------------------------------

    async def create_model(self, tenant: str, fields: Fields) -> ServiceRequest:
        """Create a training run with a new adapter."""
        state = self.store.state
        session = state.find(state.sessions, tenant, fields.text("session_id"), "session")
        run_id = f"{session.id}:train:{fields.integer('model_seq_id', least=0)}"
        request_id = f"{run_id}:create"
        if request_id not in state.requests:
            self._check_base(fields.text("base_model"))
            self._check_new_run(tenant)
            run = {
                "id": run_id,
                "tenant": tenant,
                "session_id": session.id,
                "base_model": self.base_model,
                "shape": self._build_shape(fields, run_id),
                "time": self.store.clock(),
                "user_metadata": fields.mapping("user_metadata"),
            }
            return await self._accept(tenant, "create_model", run_id, 0, {}, request_id, before=[Record("run", run)])
        return state.find(state.requests, tenant, request_id, "request")

    def describe_targets(self) -> str:
        """Say what adapters cover, and which flags of a LoRA config have no effect."""
        parts = {"train_attn": "attention", "train_mlp": "MLPs", "train_unembed": "the output layer"}
        covered = {get_target_flag(target) for target in self.trainer.targets}
        names = ", ".join(name for flag, name in parts.items() if flag in covered)
        others = "".join(
            f" {flag} has no effect: --lora-target-modules leaves out {name}."
            for flag, name in parts.items()
            if flag not in covered
        )
        return f"Adapters cover {names}.{others}"

    def _build_shape(self, fields: Fields, run_id: str) -> dict[str, Any]:
        shape = build_shape(fields, self.config, run_id)
        if not AdapterShape(**shape).select(self.trainer.targets):
            raise RequestError(f"nothing would be trained. {self.describe_targets()}", status=422)
        return shape

    def _check_base(self, name: str) -> None:
        if name != self.base_model:
            raise RequestError(f"the base model {name!r} is not served; this is {self.base_model!r}.", status=422)

    def _check_new_run(self, tenant: str) -> None:
        most = self.tenants.quotas[tenant].max_adapters
        if self.store.state.count_runs(tenant) >= most:
            raise RequestError(
                f"the tenant has {most} adapters in training, all it may have; end a session that has some.", status=403
            )

    async def submit_train(self, tenant: str, body: bytes) -> ServiceRequest:
        """Accept a forward pass, with or without a backward pass. What is wrong with its data is its result."""
        decoded = decode_train_request(body)
        run = self._find_run(tenant, decoded.model_id)
        content: dict[str, Any] = {}
        try:
            check_data(decoded, vocab_size=self.spec.vocab_size, max_positions=self.max_positions)
        except RequestError as error:
            content, body = {"refused": str(error)}, b""
        return await self._accept_next(tenant, TRAIN, run, decoded.seq_id, content, body)

    async def submit_step(self, tenant: str, fields: Fields) -> ServiceRequest:
        """Accept an update of an adapter."""
        run = self._find_run(tenant, fields.text("model_id"))
        return await self._accept_fields(tenant, "optim_step", run, fields, lambda: build_optim_step(fields))

    async def submit_save(self, tenant: str, kind: str, fields: Fields) -> ServiceRequest:
        """Accept a checkpoint for training, for sampling, or to download."""
        run = self._find_run(tenant, fields.text("model_id"))
        return await self._accept_fields(tenant, kind, run, fields, lambda: build_save(kind, run, fields))

    async def submit_load(self, tenant: str, fields: Fields) -> ServiceRequest:
        """Accept the load of a training checkpoint into a run."""
        run = self._find_run(tenant, fields.text("model_id"))

        def build() -> dict[str, Any]:
            path = fields.text("path")
            checkpoint = self.store.state.find_checkpoint(tenant, path, self.store.clock())
            if checkpoint.kind != "training":
                raise RequestError(f"{path} has no training state; load one that save_state wrote.", status=422)
            return {"path": path, "optimizer": fields.flag("optimizer")}

        return await self._accept_fields(tenant, "load_weights", run, fields, build)

    async def submit_unload(self, tenant: str, fields: Fields) -> ServiceRequest:
        """Accept the end of a run."""
        run = self._find_run(tenant, fields.text("model_id"))
        return await self._accept_next(tenant, "unload_model", run, fields.integer("seq_id", least=1), {})

    def _find_run(self, tenant: str, run_id: str) -> ServiceRun:
        state = self.store.state
        run = state.find(state.runs, tenant, run_id, "training run")
        if run.unloaded:
            raise RequestError(f"the training run {run_id!r} has ended; create another from a checkpoint.", status=410)
        return run

    async def _accept_fields(
        self, tenant: str, kind: str, run: ServiceRun, fields: Fields, build: Callable[[], dict[str, Any]]
    ) -> ServiceRequest:
        """Accept a request of a run; what is wrong with its fields is its result, so that its turn is taken."""
        seq = fields.integer("seq_id", least=1)
        try:
            content = build()
        except RequestError as error:
            content = {"refused": str(error)}
        return await self._accept_next(tenant, kind, run, seq, content)

    async def _accept_next(
        self, tenant: str, kind: str, run: ServiceRun, seq: int, content: dict[str, Any], body: bytes = b""
    ) -> ServiceRequest:
        request_id = f"{run.id}:{seq}"
        if seq < run.next_seq and request_id not in self.store.state.requests:
            raise RequestError(f"request {seq} of {run.id!r} has ended, and its result has expired.", status=410)
        if seq < 1:
            raise RequestError(f"seq_id is {seq}, must be at least 1.", status=422)
        return await self._accept(tenant, kind, run.id, seq, content, request_id, body)

    async def _accept(
        self,
        tenant: str,
        kind: str,
        target: str,
        seq: int,
        content: dict[str, Any],
        request_id: str,
        body: bytes = b"",
        before: list[Record] | None = None,
    ) -> ServiceRequest:
        """Make a request durable and queue it; one that is known already is returned as it is."""
        state, digest = self.store.state, sha256(repr((kind, content)).encode() + body).hexdigest()
        if request_id not in state.requests:
            self._check_accepting(tenant)
            record = {
                "id": request_id,
                "tenant": tenant,
                "kind": kind,
                "target": target,
                "seq": seq,
                "content": content,
                "time": self.store.clock(),
                "digest": digest,
            }
            if await self.store.accept(request_id, *(before or ()), Record("request", record, body)):
                request = state.requests[request_id]
                (self.sampling if kind == "sample" else self.training).put(request)
                return request
        request = state.find(state.requests, tenant, request_id, "request")
        if request.digest != digest:
            raise RequestError(f"seq_id {seq} of {target!r} was used for another request.", status=422)
        return request

    def _check_accepting(self, tenant: str) -> None:
        if self.problem is not None:
            raise RequestError(f"{self.problem}; restart the service.", status=503)
        most = self.tenants.quotas[tenant].max_queued
        if self.store.state.count_pending(tenant) >= most:
            raise RequestError(f"the tenant has {most} requests waiting, all it may have; wait for some.", status=429)

    # -- sampling ---------------------------------------------------------------------------

    async def create_sampler(self, tenant: str, fields: Fields) -> str:
        """Create a sampler of a checkpoint or of the base model; returns its id."""
        state = self.store.state
        session = state.find(state.sessions, tenant, fields.text("session_id"), "session")
        sampler_id = f"{session.id}:sample:{fields.integer('sampling_session_seq_id', least=0)}"
        path = fields.text("model_path", None)
        if path is None:
            self._check_base(fields.text("base_model"))
        else:
            state.find_checkpoint(tenant, path, self.store.clock())
        if sampler_id not in state.samplers:
            content = {"id": sampler_id, "tenant": tenant, "session_id": session.id, "path": path}
            await self.store.commit(Record("sampler", content))
        return sampler_id

    async def join_sampler(self, tenant: str, sampler_id: str) -> int:
        """Return a number that no other client of this sampler has."""
        sampler = self.find_sampler(tenant, sampler_id)
        await self.store.commit(Record("sampler_joined", {"id": sampler.id}))
        return sampler.clients

    def find_sampler(self, tenant: str, sampler_id: str) -> ServiceSampler:
        """Return a tenant's sampler."""
        return self.store.state.find(self.store.state.samplers, tenant, sampler_id, "sampler")

    async def submit_sample(self, tenant: str, fields: Fields) -> ServiceRequest:
        """Accept a sampling request."""
        sampler_id = fields.text("sampling_session_id", None)
        if sampler_id is not None:
            sampler = self.find_sampler(tenant, sampler_id)
            path, target = sampler.path, sampler.id
            seq = fields.integer("seq_id", least=0)
        else:
            path, seq = fields.text("model_path", None), 0
            target = f"sample:{uuid4()}"
            if path is None:
                self._check_base(fields.text("base_model"))
        if path is not None:
            self.store.state.find_checkpoint(tenant, path, self.store.clock())
        content = build_sample(fields, path, max_tokens=self.engine.max_tokens, vocab_size=self.engine.vocab_size)
        return await self._accept(tenant, "sample", target, seq, content, f"{target}:{seq}")

    # -- results and checkpoints ------------------------------------------------------------

    def find_request(self, tenant: str, request_id: str) -> ServiceRequest:
        """Return a tenant's request."""
        return self.store.state.find(self.store.state.requests, tenant, request_id, "request")

    async def cancel(self, tenant: str, request_id: str) -> None:
        """End a sampling request; others are computed in any case."""
        request = self.find_request(tenant, request_id)
        if request.kind == "sample":
            await self.sampling.cancel(request)

    async def remove_checkpoint(self, tenant: str, path: str) -> None:
        """Remove a tenant's checkpoint."""
        await self._remove_checkpoint(self.store.state.find_checkpoint(tenant, path, self.store.clock()).path)

    async def _remove_checkpoint(self, path: str) -> None:
        folder = self.store.state.checkpoints[path].folder
        await self.store.commit(Record("checkpoint_removed", {"path": path}))
        self.sampling.forget(folder)

    async def set_expiry(self, tenant: str, path: str, seconds: float | None) -> None:
        """Let a checkpoint expire after so many seconds, or never."""
        checkpoint = self.store.state.find_checkpoint(tenant, path, self.store.clock())
        expires = None if seconds is None else self.store.clock() + seconds
        await self.store.commit(Record("checkpoint", asdict(checkpoint) | {"expires": expires}))
