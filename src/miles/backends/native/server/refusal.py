"""A request that is not served: one sentence, a status, and the shape each of the two APIs gives it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from miles.core.errors import MilesError


class Refusal(MilesError):
    """Why a request is refused. ``malformed``: the body is not of the right form at all; ``param``: which part."""

    def __init__(self, message: str, *, status: int = 400, malformed: bool = False, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.malformed = malformed
        self.param = param


def malformed(message: str, param: str | None = None) -> Refusal:
    """A body of the wrong form."""
    return Refusal(message, malformed=True, param=param)


def native_body(refusal: Refusal) -> dict[str, Any]:
    """As SGLang's native endpoints say it: bodies of the wrong form in one shape, all else in another."""
    if refusal.malformed:
        return _flat(refusal, HTTPStatus(refusal.status).phrase)
    return {"error": {"message": str(refusal)}}


def openai_body(refusal: Refusal) -> dict[str, Any]:
    """As OpenAI says it (``error``) and, beside it, as SGLang does."""
    kind = HTTPStatus(refusal.status).phrase if refusal.malformed else _KINDS.get(refusal.status, "BadRequestError")
    flat = _flat(refusal, kind)
    inner = {
        "message": flat["message"],
        "type": "invalid_request_error",
        "param": refusal.param,
        "code": refusal.status,
    }
    return {**flat, "error": inner}


_KINDS = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def _flat(refusal: Refusal, kind: str) -> dict[str, Any]:
    return {
        "object": "error",
        "message": str(refusal),
        "type": kind,
        "param": refusal.param,
        "code": refusal.status,
    }
