"""Service state: sessions, training runs, samplers, checkpoints and requests of all tenants, from journal records.

``apply`` is the only way to change it, in service and when the journal is read again; ``dump`` returns records that
build the same state. Whatever a tenant names is looked up among its own: what others have does not exist for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from miles.backends.service.journal import Record
from miles.backends.service.messages import encode_train_result
from miles.rollout.serving.errors import RequestError

__all__ = ["Checkpoint", "Outcome", "ServiceRequest", "ServiceRun", "ServiceSampler", "ServiceSession", "ServiceState"]

CheckpointKind = Literal["training", "sampler", "external"]
FOLDERS: Mapping[CheckpointKind, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
"""The kinds of checkpoints, and how paths name them."""


@dataclass(slots=True, kw_only=True)
class ServiceSession:
    """A client's session: what it creates belongs to it."""

    id: str
    tenant: str
    time: float
    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    display_name: str | None = None
    ended: bool = False


@dataclass(slots=True, kw_only=True)
class ServiceRun:
    """A training run, which has one adapter. Its requests are computed in the order of their sequence numbers."""

    id: str
    tenant: str
    session_id: str
    base_model: str
    shape: dict[str, Any]
    time: float
    user_metadata: dict[str, Any] | None = None
    last_request_time: float = 0.0
    unloaded: bool = False
    next_seq: int = 1


@dataclass(slots=True, kw_only=True)
class ServiceSampler:
    """A sampling session: which checkpoint it samples from, or the base model."""

    id: str
    tenant: str
    session_id: str
    path: str | None = None
    clients: int = 0


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A saved adapter, in ``folder``. An ``ephemeral`` one belongs to a sampler and is not listed."""

    path: str
    tenant: str
    run_id: str
    kind: CheckpointKind
    name: str
    time: float
    size: int
    folder: str
    user_metadata: dict[str, str] | None = None
    expires: float | None = None
    ephemeral: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    base_model: str = ""

    @property
    def id(self) -> str:
        return f"{FOLDERS[self.kind]}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: JSON, a protobuf message, or an error and whose fault it was."""

    json: dict[str, Any] | None = None
    body: bytes = b""
    error: str | None = None
    category: Literal["user", "server"] = "server"

    @property
    def size(self) -> int:
        return len(self.body) or 256


@dataclass(slots=True, kw_only=True)
class ServiceRequest:
    """An accepted request. ``parts`` are the results of the parts computed so far; it has ended with an ``outcome``."""

    id: str
    tenant: str
    kind: str
    target: str
    seq: int
    content: dict[str, Any]
    body: bytes
    time: float
    digest: str = ""
    parts: list[bytes] = field(default_factory=list)
    loss: float = 0.0
    outcome: Outcome | None = None

    @property
    def is_pending(self) -> bool:
        return self.outcome is None


Owned = TypeVar("Owned", ServiceSession, ServiceRun, ServiceSampler, Checkpoint, ServiceRequest)


class ServiceState:
    """Everything the service knows, but the tensors. ``max_results`` is how many ended requests a tenant keeps."""

    def __init__(self, *, max_results: int = 10_000, max_result_bytes: int = 1 << 30) -> None:
        self.sessions: dict[str, ServiceSession] = {}
        self.runs: dict[str, ServiceRun] = {}
        self.samplers: dict[str, ServiceSampler] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.requests: dict[str, ServiceRequest] = {}
        self.adapters: dict[str, str] = {}
        self._max_results = max_results
        self._max_result_bytes = max_result_bytes
        self._ended: dict[str, dict[str, int]] = {}
        self._ended_bytes: dict[str, int] = {}
        self._num_pending: dict[str, int] = {}

    # -- lookup -----------------------------------------------------------------------------

    def find(self, table: Mapping[str, Owned], tenant: str, key: str, what: str) -> Owned:
        """Return what a tenant names; RequestError with 404 if it has nothing of that name."""
        found = table.get(key)
        if found is None or found.tenant != tenant:
            raise RequestError(f"there is no {what} {key!r}.", status=404)
        return found

    def find_checkpoint(self, tenant: str, path: str, now: float) -> Checkpoint:
        """Return a tenant's checkpoint that has not expired."""
        found = self.find(self.checkpoints, tenant, path, "checkpoint")
        if found.expires is not None and found.expires <= now:
            raise RequestError(f"there is no checkpoint {path!r}; it has expired.", status=404)
        return found

    def list_checkpoints(self, tenant: str, now: float, run_id: str | None = None) -> list[Checkpoint]:
        """Return a tenant's checkpoints, the newest first, without those of samplers that have no name."""
        found = [
            each
            for each in self.checkpoints.values()
            if each.tenant == tenant and not each.ephemeral and (run_id is None or each.run_id == run_id)
        ]
        return sorted((c for c in found if c.expires is None or c.expires > now), key=lambda c: -c.time)

    def count_stored_bytes(self, tenant: str) -> int:
        """Return the size of all checkpoints of a tenant."""
        return sum(each.size for each in self.checkpoints.values() if each.tenant == tenant)

    def count_runs(self, tenant: str) -> int:
        """Return how many adapters of a tenant are in training."""
        return sum(run.tenant == tenant and not run.unloaded for run in self.runs.values())

    def count_pending(self, tenant: str) -> int:
        """Return how many requests of a tenant have not ended."""
        return self._num_pending.get(tenant, 0)

    # -- changes ----------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        """Take over what a record says."""
        change = getattr(self, f"_apply_{record.kind}", None)
        assert change is not None, f"the journal has a record of the unknown kind {record.kind!r}"
        change(dict(record.content), record.body)

    def _apply_session(self, content: dict[str, Any], body: bytes) -> None:
        self.sessions[content["id"]] = ServiceSession(**content)

    def _apply_session_ended(self, content: dict[str, Any], body: bytes) -> None:
        self.sessions[content["id"]].ended = True

    def _apply_run(self, content: dict[str, Any], body: bytes) -> None:
        self.runs[content["id"]] = ServiceRun(**content)

    def _apply_run_unloaded(self, content: dict[str, Any], body: bytes) -> None:
        self.runs[content["id"]].unloaded = True
        self.adapters.pop(content["id"], None)

    def _apply_sampler(self, content: dict[str, Any], body: bytes) -> None:
        self.samplers[content["id"]] = ServiceSampler(**content)

    def _apply_sampler_joined(self, content: dict[str, Any], body: bytes) -> None:
        self.samplers[content["id"]].clients += 1

    def _apply_checkpoint(self, content: dict[str, Any], body: bytes) -> None:
        self.checkpoints[content["path"]] = Checkpoint(**content)

    def _apply_checkpoint_removed(self, content: dict[str, Any], body: bytes) -> None:
        self.checkpoints.pop(content["path"], None)

    def _apply_adapter(self, content: dict[str, Any], body: bytes) -> None:
        self.adapters[content["run"]] = content["file"]

    def _apply_loaded(self, content: dict[str, Any], body: bytes) -> None:
        """Nothing: an adapter was loaded, which a restarted trainer must know."""

    def _apply_request(self, content: dict[str, Any], body: bytes) -> None:
        self._add_request(content, body)

    def _apply_pass(self, content: dict[str, Any], body: bytes) -> None:
        self._add_parts(content["parts"], body)

    def _apply_result(self, content: dict[str, Any], body: bytes) -> None:
        for kind, effect in content.get("effects", ()):
            self.apply(Record(kind, effect))
        outcome = Outcome(
            json=content.get("json"),
            body=body,
            error=content.get("error"),
            category=content.get("category", "server"),
        )
        self._set_outcome(self.requests[content["id"]], outcome)

    def _apply_ended(self, content: dict[str, Any], body: bytes) -> None:
        outcome = {name: content.pop(name) for name in ("json", "error", "category")}
        self._add_request(content, b"")
        self._set_outcome(self.requests[content["id"]], Outcome(**outcome, body=body))

    def _add_request(self, content: dict[str, Any], body: bytes) -> None:
        parts = content.pop("part_sizes", [])
        own, first = len(body) - sum(parts), 0
        request = ServiceRequest(**content, body=body[:own])
        for size in parts:
            request.parts.append(body[own + first : own + first + size])
            first += size
        self.requests[request.id] = request
        self._num_pending[request.tenant] = self.count_pending(request.tenant) + 1
        if request.target in self.runs:
            self.runs[request.target].last_request_time = request.time

    def _add_parts(self, parts: list[Any], body: bytes) -> None:
        """Add the results of one pass: (request, part, loss, size, is the last part) of each part."""
        first = 0
        for request_id, _, loss, size, is_last in parts:
            request = self.requests[request_id]
            request.parts.append(body[first : first + size])
            request.loss += loss
            first += size
            if is_last:
                result = encode_train_result(request.parts, {"loss:sum": request.loss})
                self._set_outcome(request, Outcome(body=result))

    def _set_outcome(self, request: ServiceRequest, outcome: Outcome) -> None:
        request.outcome = outcome
        request.body = b""
        request.parts.clear()
        run = self.runs.get(request.target)
        if run is not None and request.kind not in ("create_model", "sample"):
            run.next_seq = max(run.next_seq, request.seq + 1)
        tenant = request.tenant
        self._num_pending[tenant] -= 1
        ended = self._ended.setdefault(tenant, {})
        ended[request.id] = outcome.size
        self._ended_bytes[tenant] = self._ended_bytes.get(tenant, 0) + outcome.size
        while len(ended) > self._max_results or (len(ended) > 1 and self._ended_bytes[tenant] > self._max_result_bytes):
            oldest = next(iter(ended))
            self._ended_bytes[tenant] -= ended.pop(oldest)
            self.requests.pop(oldest, None)

    # -- compaction -------------------------------------------------------------------------

    def dump(self) -> Iterator[Record]:
        """Return records that build this state; requests that have not ended keep their bodies."""
        for session in self.sessions.values():
            yield Record("session", asdict(session))
        for run in self.runs.values():
            yield Record("run", asdict(run))
        for sampler in self.samplers.values():
            yield Record("sampler", asdict(sampler))
        for checkpoint in self.checkpoints.values():
            yield Record("checkpoint", asdict(checkpoint))
        for run_id, file in self.adapters.items():
            yield Record("adapter", {"run": run_id, "file": file})
        for request in self.requests.values():
            yield from _dump_request(request)


def _dump_request(request: ServiceRequest) -> Iterator[Record]:
    content = {
        name: getattr(request, name) for name in ("id", "tenant", "kind", "target", "seq", "content", "time", "digest")
    }
    if request.outcome is None:
        sizes = [len(part) for part in request.parts]
        content |= {"loss": request.loss, "part_sizes": sizes}
        yield Record("request", content, request.body + b"".join(request.parts))
        return
    outcome = request.outcome
    content |= {"json": outcome.json, "error": outcome.error, "category": outcome.category}
    yield Record("ended", content, outcome.body)
