"""HTTP server of the training service: the endpoints of the Tinker API, tenants' keys, errors, metrics, status page."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from html import escape

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from miles.backends.service.fields import Fields
from miles.backends.service.metrics import ServiceMetrics, collect_totals
from miles.backends.service.requests import SAVES
from miles.backends.service.rest_endpoints import RestEndpoints, json_reply, read_json
from miles.backends.service.service import TrainingService
from miles.backends.service.state import ServiceRequest
from miles.core.errors import MilesError
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import is_cross_origin
from miles.rollout.serving.http_runner import build_runner

__all__ = ["NOT_OFFERED", "SUPPORTED_CLIENT", "ServiceServer"]

SUPPORTED_CLIENT = "0.36.0"
"""The version of the ``tinker`` client whose types the tests hold the endpoints against."""

TenantHandler = Callable[[str, web.Request], Awaitable[web.StreamResponse]]
_POLL_SECONDS = 20.0
_PROTOBUF = "application/x-protobuf"
NOT_OFFERED = {
    "/api/v1/auth/token": "this server takes API keys, not tokens.",
    "/api/v1/auth/apikey/me": "API keys are in the file of --service-tenants.",
    "/api/v1/create_custom_loss": "custom losses run in the client; use forward_backward_custom with a function.",
    "/api/v1/retrieve_futures": "results are retrieved one by one; use retrieve_future.",
    "/api/v1/copy_weights": "checkpoints cannot be copied; load one into a new run and save it.",
    "/api/v1/audit": "there is no audit log.",
    "/api/v1/billing/usage/events": "there is no billing.",
    "/api/v1/billing/usage/checkpoints/current": "there is no billing.",
    "/api/v1/sessions/search": "sessions cannot be searched; list them.",
    "/api/v1/sessions/{session}/project": "there are no projects.",
    "/api/v1/sessions/{session}/trace_export": "there are no traces.",
}
"""Endpoints that the client may call and that are refused, with the reason."""


class ServiceServer:
    """One service over HTTP. ``start`` and ``stop`` run on the service's event loop; it does not stop the service."""

    def __init__(
        self,
        service: TrainingService,
        *,
        max_body_mib: int = 64,
        poll_seconds: float = _POLL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.metrics = ServiceMetrics(service)
        self._rest = RestEndpoints(service)
        self._max_body = max_body_mib << 20
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._started = clock()
        self._draining = False
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    # -- start and stop ---------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port, which is a free one for port 0."""
        app = web.Application(client_max_size=self._max_body, middlewares=[self._handle])
        self._add_routes(app)
        self._runner = build_runner(app)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Refuse new requests and close every connection. Accepted requests stay in the journal."""
        self._draining = True
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _add_routes(self, app: web.Application) -> None:
        rest, prefix = self._rest, "/api/v1"
        run, checkpoint = f"{prefix}/training_runs/{{run}}", "/checkpoints/{folder}/{name}"
        posts: dict[str, TenantHandler] = {
            "client/config": self._get_config,
            "client/dynamic_config": self._get_dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._keep_alive,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "telemetry": self._take_telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._train,
            "forward": self._train,
            "optim_step": self._step,
            "load_weights": self._load,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": rest.get_weights_info,
            **{kind: self._save_handler(kind) for kind in SAVES},
        }
        gets: dict[str, TenantHandler] = {
            f"{prefix}/get_server_capabilities": self._get_capabilities,
            f"{prefix}/training_runs": rest.list_runs,
            run: rest.get_run,
            f"{run}/checkpoints": rest.list_checkpoints,
            f"{run}{checkpoint}/external_weights_urls": rest.get_file_urls,
            f"{prefix}/checkpoints": rest.list_all_checkpoints,
            f"{prefix}/sessions": rest.list_sessions,
            f"{prefix}/sessions/{{session}}": rest.get_session,
            f"{prefix}/samplers/{{sampler}}": rest.get_sampler,
        }
        routes = [
            *(web.post(f"{prefix}/{name}", self._own(handler)) for name, handler in posts.items()),
            *(web.get(path, self._own(handler)) for path, handler in gets.items()),
            web.delete(f"{run}{checkpoint}", self._own(rest.delete_checkpoint)),
            web.put(f"{run}{checkpoint}/ttl", self._own(rest.set_ttl)),
            web.post(f"{run}{checkpoint}/publish", self._own(rest.refuse_publish)),
            web.delete(f"{run}{checkpoint}/publish", self._own(rest.refuse_publish)),
            web.post(f"{prefix}/sessions/{{session}}/finish", self._own(rest.finish_session)),
            web.get(f"{prefix}/files/{{expires}}/{{signature}}/{{folder}}/{{file}}", rest.download),
            web.get(f"{prefix}/healthz", self._get_health),
            web.get("/health", self._get_health),
            web.get("/metrics", self._get_metrics),
            web.get("/", self._get_status),
            *(web.route("*", path, self._own(_refuse(text))) for path, text in NOT_OFFERED.items()),
        ]
        # The router takes the first match: a session named "search" must not hide the endpoint.
        app.router.add_routes(sorted(routes, key=lambda route: "{" in getattr(route, "path", "")))

    # -- every request ----------------------------------------------------------------------

    @web.middleware
    async def _handle(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Report errors as JSON with one sentence, and count requests."""
        resource = request.match_info.route.resource
        path = "unknown" if resource is None else resource.canonical
        try:
            if self._draining:
                raise RequestError("the server is shutting down; try again.", status=503)
            response = await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = _error_reply(error.reason, error.status)
        except Exception as error:
            response = self._convert_error(request, error)
        self.metrics.count_request(path, response.status)
        return response

    def _convert_error(self, request: web.Request, error: Exception) -> web.Response:
        if isinstance(error, RequestError):
            return _error_reply(str(error), error.status)
        if isinstance(error, BadHttpMessage | web.RequestPayloadError):
            return _error_reply("The body is not what its headers say: it cannot be decoded.", 400)
        if isinstance(error, MilesError):
            return _error_reply(str(error), 503)
        request.app.logger.exception("%s %s failed", request.method, request.path, exc_info=error)
        return _error_reply(f"The server failed on this request ({type(error).__name__}); see its log.", 500)

    def _own(self, handler: TenantHandler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that gets the tenant of the key; without a valid one nothing of the body is read."""

        async def handle(request: web.Request) -> web.StreamResponse:
            tenants = self.service.tenants
            if tenants.is_open and is_cross_origin(request.headers):
                return _error_reply("requests of web pages are refused while the service has no keys.", 403)
            tenant = tenants.find(_read_key(request))
            if tenant is None:
                return _error_reply("the API key is missing or not one of this service's.", 401)
            return await handler(tenant, request)

        return handle

    # -- the service ------------------------------------------------------------------------

    async def _get_config(self, tenant: str, request: web.Request) -> web.Response:
        """Tell the client what the server does: API keys, one poll per result, no compressed requests."""
        return json_reply({"pjwt_auth_enabled": False, "sample_join_sampling_session": True})

    async def _get_dynamic_config(self, tenant: str, request: web.Request) -> web.Response:
        return json_reply({"sample_cancel_enabled": True})

    async def _get_capabilities(self, tenant: str, request: web.Request) -> web.Response:
        model = {
            "model_name": self.service.base_model,
            "max_context_length": self.service.engine.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return json_reply({"supported_models": [model]})

    async def _create_session(self, tenant: str, request: web.Request) -> web.Response:
        fields = Fields(await read_json(request))
        session_id = await self.service.create_session(tenant, fields)
        sdk, warning = fields.text("sdk_version", ""), None
        if sdk and sdk != SUPPORTED_CLIENT:
            warning = f"This server was tested with tinker {SUPPORTED_CLIENT}, not {sdk}."
        info = self.service.describe_targets()
        return json_reply(
            {"type": "create_session", "session_id": session_id, "info_message": info, "warning_message": warning}
        )

    async def _keep_alive(self, tenant: str, request: web.Request) -> web.Response:
        self.service.keep_alive(tenant, Fields(await read_json(request)).text("session_id"))
        return json_reply({"type": "session_heartbeat"})

    async def _create_sampler(self, tenant: str, request: web.Request) -> web.Response:
        sampler_id = await self.service.create_sampler(tenant, Fields(await read_json(request)))
        return json_reply({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _join_sampler(self, tenant: str, request: web.Request) -> web.Response:
        sampler_id = Fields(await read_json(request)).text("sampling_session_id")
        counter = await self.service.join_sampler(tenant, sampler_id)
        return json_reply({"type": "join_sampling_session", "client_counter": counter})

    async def _take_telemetry(self, tenant: str, request: web.Request) -> web.Response:
        """Accept the client's telemetry and drop it."""
        await request.read()
        return json_reply({"status": "accepted"})

    # -- training and sampling --------------------------------------------------------------

    async def _create_model(self, tenant: str, request: web.Request) -> web.Response:
        return _future_reply(await self.service.create_model(tenant, Fields(await read_json(request))))

    async def _get_info(self, tenant: str, request: web.Request) -> web.Response:
        state, run_id = self.service.store.state, Fields(await read_json(request)).text("model_id")
        run = state.find(state.runs, tenant, run_id, "training run")
        name = self.service.base_model
        data = {"arch": self.service.spec.family, "model_name": name, "tokenizer_id": self.service.tokenizer_id}
        return json_reply(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": run.id,
                "is_lora": True,
                "lora_rank": run.shape["rank"],
                "model_name": name,
            }
        )

    async def _train(self, tenant: str, request: web.Request) -> web.Response:
        if request.content_type != _PROTOBUF:
            raise RequestError(f"the body must be {_PROTOBUF}, as the tinker client sends it.", status=415)
        return _future_reply(await self.service.submit_train(tenant, await request.read()))

    async def _step(self, tenant: str, request: web.Request) -> web.Response:
        return _future_reply(await self.service.submit_step(tenant, Fields(await read_json(request))))

    async def _load(self, tenant: str, request: web.Request) -> web.Response:
        return _future_reply(await self.service.submit_load(tenant, Fields(await read_json(request))))

    async def _unload(self, tenant: str, request: web.Request) -> web.Response:
        return _future_reply(await self.service.submit_unload(tenant, Fields(await read_json(request))))

    def _save_handler(self, kind: str) -> TenantHandler:
        async def save(tenant: str, request: web.Request) -> web.Response:
            return _future_reply(await self.service.submit_save(tenant, kind, Fields(await read_json(request))))

        return save

    async def _sample(self, tenant: str, request: web.Request) -> web.Response:
        accepted = await self.service.submit_sample(tenant, Fields(await read_json(request)))
        ids = [f"{accepted.id}:{number}" for number in range(accepted.content["num_samples"])]
        return json_reply({"request_id": accepted.id, "sample_sequence_ids": ids})

    # -- results ----------------------------------------------------------------------------

    async def _retrieve(self, tenant: str, request: web.Request) -> web.Response:
        """Wait for a result; 408 if it is not there yet, which the client takes for "ask again"."""
        found = self.service.find_request(tenant, Fields(await read_json(request)).text("request_id"))
        if not await self.service.store.wait(found, self._poll_seconds):
            if self.service.problem is not None:
                raise RequestError(f"{self.service.problem}; restart the service.", status=503)
            return json_reply({"type": "try_again", "request_id": found.id, "queue_state": "active"}, 408)
        outcome = found.outcome
        assert outcome is not None
        if outcome.error is not None:
            return json_reply({"error": outcome.error, "category": outcome.category})
        if outcome.json is not None:
            return json_reply(outcome.json)
        return web.Response(body=outcome.body, content_type=_PROTOBUF)

    async def _cancel(self, tenant: str, request: web.Request) -> web.Response:
        await self.service.cancel(tenant, Fields(await read_json(request)).text("request_id"))
        return web.Response(status=204)

    # -- health, metrics, status ------------------------------------------------------------

    async def _get_health(self, request: web.Request) -> web.Response:
        problem = self.service.problem
        return json_reply({"status": "ok"} if problem is None else {"detail": problem}, 200 if problem is None else 503)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(), content_type="text/plain", charset="utf-8")

    async def _get_status(self, request: web.Request) -> web.Response:
        totals = collect_totals(self.service) | {"uptime_seconds": round(self._clock() - self._started)}
        rows = "".join(
            f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{value:,.0f}</td></tr>" for name, value in totals.items()
        )
        state = escape(self.service.problem or "running")
        page = (
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>"
            f"<title>Miles training service</title><style>{_STYLE}</style><h1>Miles training service</h1>"
            f"<p>{escape(self.service.base_model)}: {state}</p><table>{rows}</table>"
        )
        return web.Response(text=page, content_type="text/html", headers={"Content-Security-Policy": _POLICY})


_STYLE = (
    "body{font:15px system-ui;margin:2rem auto;max-width:34rem}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;font-weight:400;padding:.3rem 0;border-bottom:1px solid #ddd}td{text-align:right}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _refuse(text: str) -> TenantHandler:
    async def refuse(tenant: str, request: web.Request) -> web.Response:
        raise RequestError(f"{request.path} is not offered: {text}", status=404)

    return refuse


def _read_key(request: web.Request) -> str | None:
    """Return the key, as the client's header or as a bearer token."""
    if (key := request.headers.get("X-API-Key")) is not None:
        return key
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else None


def _future_reply(request: ServiceRequest) -> web.Response:
    return json_reply({"request_id": request.id, "model_id": request.target})


def _error_reply(message: str, status: int) -> web.Response:
    return json_reply({"detail": message, "error": {"message": message}}, status)
