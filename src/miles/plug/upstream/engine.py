"""The engine as upstream's generate functions ask it: requests to ``/generate``, answered without any network.

A function posts tokens or text and is given text, tokens and log-probs; what the engine wrote is kept as it was
stamped, so that the sample can be traced back to it (see ``convert``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from miles.core.errors import PlugError
from miles.core.protocols import Completion, Engine, Sampling
from miles.core.types import Tokens
from miles.plug.upstream.run import Run

_SAMPLED = {f.name for f in fields(Sampling)} - {"seed"}
# What says nothing of how tokens are drawn.
_SHOWN = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt under way: its engine, and each request with what the engine answered."""

    run: Run
    engine: Engine
    sampling: Sampling
    asked: list[tuple[Tokens, Completion]] = field(default_factory=list)


_ATTEMPT: ContextVar[Attempt | None] = ContextVar("attempt", default=None)


@contextmanager
def attempting(attempt: Attempt) -> Iterator[None]:
    """Whatever is asked of the engine in here belongs to ``attempt``."""
    token = _ATTEMPT.set(attempt)
    try:
        yield
    finally:
        _ATTEMPT.reset(token)


def as_parameters(sampling: Sampling) -> dict[str, Any]:
    """How tokens are drawn, as upstream writes it."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


async def post(url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Ask the engine of the attempt under way, whatever host ``url`` names; only ``/generate`` can be asked."""
    attempt = _ATTEMPT.get()
    if attempt is None or urlsplit(url).path.rstrip("/").rpartition("/")[2] != "generate":
        raise PlugError(
            f"post to {url} does not reach the engine: it is asked at /generate, while an attempt is under way; "
            "ask other servers with a client of your own."
        )
    given, parameters = _input(attempt.run, payload), dict(payload.get("sampling_params") or {})
    completion = await attempt.engine.generate(given, _sampling(attempt, parameters))
    attempt.asked.append((given, completion))
    return _reply(attempt, given, completion, parameters)


def _input(run: Run, payload: Mapping[str, Any]) -> Tokens:
    if payload.get("input_ids") is not None:
        ids = payload["input_ids"]
    elif isinstance(payload.get("text"), str):
        ids = run.tokenizer().encode(payload["text"], add_special_tokens=False)
    else:
        raise PlugError("A request to /generate has neither input_ids nor text; give it one of them.")
    if not len(ids) or not all(isinstance(i, int | np.integer) for i in ids):
        raise PlugError("input_ids of a request to /generate are the tokens of one prompt, as a list of numbers.")
    return np.array(ids, np.int32)


def _sampling(attempt: Attempt, parameters: Mapping[str, Any]) -> Sampling:
    if odd := sorted(parameters.keys() - _SAMPLED - _SHOWN):
        raise PlugError(
            f"sampling_params of a request to /generate has {odd[0]}, which this engine does not know; leave it out."
        )
    told: dict[str, Any] = {k: v for k, v in parameters.items() if k in _SAMPLED and v is not None}
    if isinstance(told.get("stop"), str):
        told["stop"] = (told["stop"],)
    told |= {name: tuple(told[name]) for name in ("stop", "stop_token_ids") if name in told}
    # The same luck would be drawn again for each further request of an attempt.
    return replace(attempt.sampling, seed=attempt.sampling.seed + len(attempt.asked), **told)


def _reply(attempt: Attempt, given: Tokens, completion: Completion, parameters: Mapping[str, Any]) -> dict[str, Any]:
    ids = [int(token) for span in completion.spans for token in span.tokens]
    logprobs = [float(p) for span in completion.spans if span.logprobs is not None for p in span.logprobs]
    spoken = ids
    if completion.reason == "stop" and not parameters.get("no_stop_trim", False) and ids:
        ends = {*attempt.sampling.stop_token_ids, attempt.run.tokenizer().eos_token_id}
        spoken = ids[:-1] if ids[-1] in ends else ids
    skip = bool(parameters.get("skip_special_tokens", True))
    versions = [span.version.number for span in completion.spans if span.version is not None]
    return {
        "text": attempt.run.tokenizer().decode(spoken, skip_special_tokens=skip),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": completion.reason},
            "prompt_tokens": len(given),
            "completion_tokens": len(ids),
            "cached_tokens": completion.cached_tokens,
            "weight_version": str(versions[-1]) if versions else "0",
            "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, ids, strict=True)],
        },
    }


class GenerateState:
    """What upstream's generate functions share: the checkpoint's tokenizer, and how tokens are drawn."""

    def __init__(self, args: Any) -> None:
        attempt = _ATTEMPT.get()
        if attempt is None:
            raise PlugError("GenerateState is made inside a generate function, while an attempt is under way.")
        self.args, self.aborted = args, False
        self.tokenizer = attempt.run.tokenizer()
        self.sampling_params = as_parameters(attempt.sampling)
