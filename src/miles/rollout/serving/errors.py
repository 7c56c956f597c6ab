"""HTTP errors of the chat APIs: one exception, and the error body of OpenAI, Anthropic and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

from miles.core.errors import MilesError

ErrorFormat = Literal["openai", "anthropic", "sglang", "sglang_openai", "sglang_stream"]

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's error code for a conversation that leaves no room for a reply."""


class RequestError(MilesError):
    """A request that is refused, with its HTTP status.

    ``param`` names the field; ``code`` is a machine-readable reason; ``malformed``: a value has the wrong type, which
    SGLang reports in another body than a value out of range. ``retryable`` sets the header that the official clients
    check before they retry: a turn that is retried without need becomes an extra branch of its session.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        malformed: bool = False,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.malformed = malformed
        self.retryable = retryable

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "true" if self.retryable else "false"}


class SessionError(MilesError):
    """A request that a session cannot serve; the message says why and what to do."""


class ContextLengthError(SessionError):
    """A conversation that leaves no room for a reply; agents that compact their context catch this one."""


def error_body(error: RequestError, format: ErrorFormat) -> dict[str, Any]:
    """The JSON body of an error. ``sglang_openai`` is OpenAI's body with SGLang's fields beside it."""
    message, status = str(error), error.status
    server_fault = status >= 500
    if format == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if server_fault else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    if format == "openai":
        kind = _OPENAI_TYPES.get(status, "api_error" if server_fault else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}
    if format == "sglang_stream":
        kind = "internal_error" if server_fault else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "code": status, "retryable": False}}
    phrase = HTTPStatus(status).phrase
    flat = {"object": "error", "message": message, "type": phrase, "param": error.param, "code": status}
    if format == "sglang":
        return flat if error.malformed else {"error": {"message": message}}
    if not error.malformed:
        flat["type"] = _SGLANG_TYPES.get(status, "BadRequestError")
    inner = {"message": message, "type": "invalid_request_error", "param": error.param, "code": status}
    return {**flat, "error": inner}


_SGLANG_TYPES: Mapping[int, str] = {
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
