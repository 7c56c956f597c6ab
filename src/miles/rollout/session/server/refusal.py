"""A request that is not served: one sentence, a status, and the shape each API gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from miles.core.errors import MilesError

Dialect = Literal["openai", "anthropic"]

FULL = "context_length_exceeded"
"""The code agents know a context by that has no room left."""


class Refusal(MilesError):
    """Why a request is refused. ``param``: which part of the body; ``code``: a word a program may go by.

    ``again``: whether sending the same once more may help. The official clients go by it, and a turn that is sent
    again without need is a branch nobody asked for.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, again: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.again = again

    @property
    def headers(self) -> dict[str, str]:
        """What the official clients look at before they try again of their own accord."""
        return {"x-should-retry": "true" if self.again else "false"}


def body_of(refusal: Refusal, dialect: Dialect) -> dict[str, Any]:
    """The JSON of a refusal, as the API in question says it."""
    if dialect == "anthropic":
        return {"type": "error", "error": {"type": _anthropic_kind(refusal.status), "message": str(refusal)}}
    return {
        "error": {
            "message": str(refusal),
            "type": _OPENAI_KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error"),
            "param": refusal.param,
            "code": refusal.code,
        }
    }


_OPENAI_KINDS: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_kind(status: int) -> str:
    return _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
