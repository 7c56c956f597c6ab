"""The HTTP application of the dashboard: static pages, JSON queries and images, all read-only.

Model text travels as JSON only. The Content-Security-Policy allows scripts and styles of this server alone, and no
string to become HTML (trusted types), so that text of a model cannot run in the page.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from miles.core.image_files import ImageFileError, read_image_info
from miles.observe.dashboard.api import ROLLOUT_QUERIES, DashboardApi, QueryError
from miles.observe.dashboard.web_files import WEB_FILES, read_web_file
from miles.rollout.serving.http import dump_json, has_valid_key, is_cross_origin

COOKIE = "miles_token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_COMPRESSED_BYTES = 32 << 10
_MAX_IMAGE_BYTES = 64 << 20
_IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(api: DashboardApi, *, token: str | None) -> web.Application:
    """Build the application; with a ``token``, requests without it are refused."""
    app = web.Application(middlewares=[_build_guard(token)], client_max_size=1024)
    views = _Views(api)
    app.router.add_get("/api/{name}", views.answer_query)
    app.router.add_get("/media", views.send_image)
    app.router.add_get("/", views.send_page)
    app.router.add_get("/web/{name}", views.send_page)
    app.on_cleanup.append(views.close)
    return app


class _Views:
    """Handlers; files are read in two threads, one for the logs and one for rollouts, which may take seconds."""

    def __init__(self, api: DashboardApi) -> None:
        self._api = api
        self._log_thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard-logs")
        self._rollout_thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard-rollouts")

    async def answer_query(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        params = {key: request.query.getall(key) for key in request.query}
        thread = self._rollout_thread if name in ROLLOUT_QUERIES else self._log_thread
        try:
            value = await asyncio.get_running_loop().run_in_executor(thread, self._api.query, name, params)
        except QueryError as error:
            return _reply({"error": str(error)}, status=error.status)
        return _reply(value)

    async def send_image(self, request: web.Request) -> web.Response:
        params = {key: request.query.getall(key) for key in request.query}
        try:
            path = self._api.find_image(params)
        except QueryError as error:
            return _reply({"error": str(error)}, status=error.status)
        return await asyncio.get_running_loop().run_in_executor(self._rollout_thread, _read_image, path)

    async def send_page(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        if name not in WEB_FILES:
            return _reply({"error": "There is no such page."}, status=404)
        return web.Response(body=read_web_file(name), content_type=WEB_FILES[name], charset="utf-8")

    async def close(self, app: web.Application) -> None:
        for thread in (self._log_thread, self._rollout_thread):
            thread.shutdown(wait=False, cancel_futures=True)


def _reply(value: Any, status: int = 200) -> web.Response:
    response = web.Response(body=dump_json(value), status=status, content_type="application/json", charset="utf-8")
    if isinstance(response.body, bytes) and len(response.body) > _COMPRESSED_BYTES:
        response.enable_compression(web.ContentCoding.gzip)
    return response


def _read_image(path: Path) -> web.Response:
    """Send an image of a raster format; anything else, such as SVG, which may hold scripts, is refused."""
    try:
        data = path.read_bytes()[: _MAX_IMAGE_BYTES + 1]
        kind = read_image_info(data).format.lower()
    except (OSError, ImageFileError) as error:
        return _reply({"error": f"The image cannot be read: {error}"}, status=404)
    if kind not in _IMAGE_TYPES or len(data) > _MAX_IMAGE_BYTES:
        return _reply({"error": f"Images of type {kind}, or above 64 MiB, are not shown."}, status=415)
    return web.Response(body=data, content_type=_IMAGE_TYPES[kind])


# -- access ---------------------------------------------------------------------------------


def _build_guard(token: str | None) -> Any:
    """Build the middleware that checks the token, or without one that no other site's page sends requests."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None:
            response = _exchange_token(request, token)
            if response is None and not _has_token(request, token):
                response = _reply({"error": "Open the address that miles view printed, with its token."}, status=401)
        elif is_cross_origin(request.headers):
            response = _reply({"error": "Requests of other sites are refused."}, status=403)
        else:
            response = None
        if response is None:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = _reply({"error": error.reason}, status=error.status)
        _set_headers(response, HEADERS)
        return response

    return guard


def _set_headers(response: web.StreamResponse, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        response.headers[name] = value


def _exchange_token(request: web.Request, token: str) -> web.Response | None:
    """Answer the address with ``?token=`` by a cookie and the address without it, which may then be shown around."""
    sent = request.query.get("token")
    if request.path != "/" or sent is None or not _is_equal(sent, token):
        return None
    response = web.Response(status=303, headers={"Location": "/"})
    response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
    return response


def _has_token(request: web.Request, token: str) -> bool:
    return _is_equal(request.cookies.get(COOKIE, ""), token) or has_valid_key(request.headers, token)


def _is_equal(sent: str, token: str) -> bool:
    return secrets.compare_digest(sent.encode("utf-8", "surrogateescape"), token.encode())
