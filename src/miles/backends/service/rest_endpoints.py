"""Endpoints of the Tinker API that list and manage what a tenant has: runs, checkpoints, sessions, samplers, files."""

from __future__ import annotations

import hmac
import os
import secrets
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import web

from miles.backends.service.fields import Fields
from miles.backends.service.service import TrainingService
from miles.backends.service.state import FOLDERS, Checkpoint, CheckpointKind, ServiceRun
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import dump_json, load_json

__all__ = ["RestEndpoints", "json_reply"]

_URL_SECONDS = 3600
_KINDS: dict[str, CheckpointKind] = {folder: kind for kind, folder in FOLDERS.items()}
_MAX_LIMIT = 1000


def json_reply(value: Any, status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=dump_json(value), status=status, content_type="application/json")


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class RestEndpoints:
    """Handlers; each gets the tenant that the key names."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._secret = _read_secret(service.store.folder / "url_key")

    # -- training runs ----------------------------------------------------------------------

    async def list_runs(self, tenant: str, request: web.Request) -> web.Response:
        offset, limit = _read_page(request)
        own = [run for run in self._service.store.state.runs.values() if run.tenant == tenant]
        own.sort(key=lambda run: -max(run.time, run.last_request_time))
        page = [self._describe_run(run) for run in own[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(own)}
        return json_reply({"training_runs": page, "cursor": cursor})

    async def get_run(self, tenant: str, request: web.Request) -> web.Response:
        return json_reply(self._describe_run(self._find_run(tenant, request.match_info["run"])))

    async def list_checkpoints(self, tenant: str, request: web.Request) -> web.Response:
        run = self._find_run(tenant, request.match_info["run"])
        found = self._service.store.state.list_checkpoints(tenant, self._now, run.id)
        return json_reply({"checkpoints": [_describe_checkpoint(each) for each in found]})

    async def list_all_checkpoints(self, tenant: str, request: web.Request) -> web.Response:
        offset, limit = _read_page(request)
        found = self._service.store.state.list_checkpoints(tenant, self._now)
        page = [_describe_checkpoint(each) for each in found[offset : offset + limit]]
        return json_reply(
            {"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}
        )

    async def get_weights_info(self, tenant: str, request: web.Request) -> web.Response:
        fields = Fields(await read_json(request))
        path = fields.text("tinker_path")
        checkpoint = self._service.store.state.find_checkpoint(tenant, path, self._now)
        shape = checkpoint.shape
        return json_reply(
            {
                "base_model": checkpoint.base_model,
                "is_lora": True,
                "lora_rank": shape["rank"],
                "train_unembed": shape.get("train_unembed", False),
                "train_mlp": shape["train_mlp"],
                "train_attn": shape["train_attn"],
            }
        )

    def _find_run(self, tenant: str, run_id: str) -> ServiceRun:
        state = self._service.store.state
        return state.find(state.runs, tenant, run_id, "training run")

    def _describe_run(self, run: ServiceRun) -> dict[str, Any]:
        found = self._service.store.state.list_checkpoints(run.tenant, self._now, run.id)
        newest = {kind: next((c for c in found if c.kind == kind), None) for kind in ("training", "sampler")}
        training, sampler = (None if c is None else _describe_checkpoint(c) for c in newest.values())
        metadata = run.user_metadata
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.tenant,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.shape["rank"],
            "last_request_time": _format_time(max(run.time, run.last_request_time)),
            "last_checkpoint": training,
            "last_sampler_checkpoint": sampler,
            "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
        }

    # -- one checkpoint ---------------------------------------------------------------------

    def _read_path(self, request: web.Request) -> str:
        info = request.match_info
        if info["folder"] not in _KINDS:
            raise RequestError(f"there is no checkpoint {info['folder']}/{info['name']!r}.", status=404)
        return f"tinker://{info['run']}/{info['folder']}/{info['name']}"

    async def delete_checkpoint(self, tenant: str, request: web.Request) -> web.Response:
        await self._service.remove_checkpoint(tenant, self._read_path(request))
        return web.Response(status=204)

    async def set_ttl(self, tenant: str, request: web.Request) -> web.Response:
        fields = Fields(await read_json(request))
        seconds = fields.integer("ttl_seconds", least=1) if "ttl_seconds" in fields else None
        await self._service.set_expiry(tenant, self._read_path(request), seconds)
        return web.Response(status=204)

    async def refuse_publish(self, tenant: str, request: web.Request) -> web.Response:
        raise RequestError("checkpoints cannot be published: tenants see their own only.", status=403)

    async def get_file_urls(self, tenant: str, request: web.Request) -> web.Response:
        """Return signed URLs of a checkpoint's files; whoever has one may download the file until it expires."""
        checkpoint = self._service.store.state.find_checkpoint(tenant, self._read_path(request), self._now)
        expires = int(self._now) + _URL_SECONDS
        folder = self._service.files.find(checkpoint)
        origin = f"{request.scheme}://{request.host}"
        urls = {
            file.name: f"{origin}/api/v1/files/{expires}/{self._sign(expires, checkpoint.folder, file.name)}/"
            f"{checkpoint.folder}/{file.name}"
            for file in sorted(folder.iterdir())
        }
        return json_reply({"urls": urls, "expires": _format_time(expires)})

    async def download(self, request: web.Request) -> web.StreamResponse:
        """Send a file to whoever has its signed URL."""
        info = request.match_info
        expires = int(info["expires"]) if info["expires"].isdigit() else 0
        wanted = self._sign(expires, info["folder"], info["file"])
        if expires < self._now or not hmac.compare_digest(wanted.encode(), info["signature"].encode()):
            raise RequestError("the URL has expired, or is not one of this server; ask for another.", status=403)
        file = self._service.files.folder / info["folder"] / info["file"]
        if not file.is_file():
            raise RequestError("the file is not there any more.", status=404)
        return web.FileResponse(file)

    def _sign(self, expires: int, folder: str, file: str) -> str:
        return hmac.new(self._secret, f"{expires}/{folder}/{file}".encode(), sha256).hexdigest()

    # -- sessions and samplers --------------------------------------------------------------

    async def list_sessions(self, tenant: str, request: web.Request) -> web.Response:
        offset, limit = _read_page(request)
        own = [each for each in self._service.store.state.sessions.values() if each.tenant == tenant]
        own.sort(key=lambda session: -session.time)
        return json_reply({"sessions": [session.id for session in own[offset : offset + limit]]})

    async def get_session(self, tenant: str, request: web.Request) -> web.Response:
        state = self._service.store.state
        session = state.find(state.sessions, tenant, request.match_info["session"], "session")
        metadata = session.user_metadata
        return json_reply(
            {
                "training_run_ids": [run.id for run in state.runs.values() if run.session_id == session.id],
                "sampler_ids": [each.id for each in state.samplers.values() if each.session_id == session.id],
                "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
                "display_name": session.display_name,
            }
        )

    async def finish_session(self, tenant: str, request: web.Request) -> web.Response:
        await self._service.end_session(tenant, request.match_info["session"])
        return web.Response(status=204)

    async def get_sampler(self, tenant: str, request: web.Request) -> web.Response:
        sampler = self._service.find_sampler(tenant, request.match_info["sampler"])
        return json_reply(
            {"sampler_id": sampler.id, "base_model": self._service.base_model, "model_path": sampler.path}
        )

    @property
    def _now(self) -> float:
        return self._service.store.clock()


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": checkpoint.kind,
        "time": _format_time(checkpoint.time),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else _format_time(checkpoint.expires),
    }


def _read_page(request: web.Request) -> tuple[int, int]:
    query = request.query
    words = {"offset": query.get("offset", "0"), "limit": query.get("limit", "20")}
    for name, word in words.items():
        if not word.isdigit():
            raise RequestError(f"{name} is {word!r}, must be a whole number, 0 or more.", status=422)
    return int(words["offset"]), min(int(words["limit"]), _MAX_LIMIT)


async def read_json(request: web.Request) -> Any:
    """Return the JSON of a request's body."""
    return load_json(await request.read())


def _read_secret(file: Path) -> bytes:
    """Return the key that signs URLs, which is made once and stays on this machine."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(32))
    return file.read_bytes()
