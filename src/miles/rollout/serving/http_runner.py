"""The aiohttp runner of both servers: its timeouts, and a log without the errors of clients."""

from __future__ import annotations

import logging
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from miles.rollout.serving.http import CONNECTION_SECONDS

_CLIENT_ERRORS = (HttpProcessingError, web.RequestPayloadError, web.HTTPException, ConnectionError, zlib.error)


def build_runner(app: web.Application) -> web.AppRunner:
    """The runner of ``app``; a handler is cancelled when its client disconnects."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=CONNECTION_SECONDS,
        lingering_time=1.0,
        logger=_build_logger(),
    )


def _build_logger() -> logging.Logger:
    """A client that sent what cannot be read has its reply; the log is for errors of the server."""
    logger = logging.getLogger("miles.http")
    if _is_server_error not in logger.filters:
        logger.addFilter(_is_server_error)
    return logger


def _is_server_error(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, _CLIENT_ERRORS)
