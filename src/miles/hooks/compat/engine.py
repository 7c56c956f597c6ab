"""Upstream's engine API: requests to ``/generate``, answered by the run's engine without a network.

A function posts tokens or text and gets text, tokens and log-probs; the engine's spans are recorded, so that the
sample can be traced back to them (see ``convert``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from miles.core.errors import HookError
from miles.core.protocols import Completion, Engine, SamplingParams
from miles.core.types import Tokens
from miles.hooks.compat.types import UpstreamContext

_SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)} - {"seed"}
# Parameters that only affect the text of a reply.
_TEXT_FIELDS = {"skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens"}


@dataclass(slots=True, kw_only=True)
class TrajectoryRequests:
    """The engine requests of one running trajectory, each with its completion."""

    run: UpstreamContext
    engine: Engine
    sampling: SamplingParams
    asked: list[tuple[Tokens, Completion]] = field(default_factory=list)


_CURRENT: ContextVar[TrajectoryRequests | None] = ContextVar("trajectory_requests", default=None)


@contextmanager
def record_requests(trajectory: TrajectoryRequests) -> Iterator[None]:
    """Record engine requests of this context in ``trajectory``."""
    token = _CURRENT.set(trajectory)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def sampling_params_dict(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in upstream's format."""
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
    """Send a request to the engine of the running trajectory, whatever host ``url`` names; only ``/generate``
    exists."""
    trajectory = _CURRENT.get()
    if trajectory is None or urlsplit(url).path.rstrip("/").rpartition("/")[2] != "generate":
        raise HookError(
            f"post to {url} does not reach the engine: only /generate is served, while a trajectory is generated; "
            "use a client of your own for other servers."
        )
    tokens, parameters = _parse_input(trajectory.run, payload), dict(payload.get("sampling_params") or {})
    completion = await trajectory.engine.generate(tokens, _parse_sampling(trajectory, parameters))
    trajectory.asked.append((tokens, completion))
    return _format_reply(trajectory, tokens, completion, parameters)


def _parse_input(run: UpstreamContext, payload: Mapping[str, Any]) -> Tokens:
    if payload.get("input_ids") is not None:
        ids = payload["input_ids"]
    elif isinstance(payload.get("text"), str):
        ids = run.tokenizer().encode(payload["text"], add_special_tokens=False)
    else:
        raise HookError("A request to /generate has neither input_ids nor text; give it one of them.")
    if not len(ids) or not all(isinstance(i, int | np.integer) for i in ids):
        raise HookError("input_ids of a request to /generate are the tokens of one prompt, as a list of numbers.")
    return np.array(ids, np.int32)


def _parse_sampling(trajectory: TrajectoryRequests, parameters: Mapping[str, Any]) -> SamplingParams:
    if unknown := sorted(parameters.keys() - _SAMPLING_FIELDS - _TEXT_FIELDS):
        raise HookError(
            f"sampling_params of a request to /generate has {unknown[0]}, which this engine does not know; leave it "
            f"out."
        )
    values: dict[str, Any] = {k: v for k, v in parameters.items() if k in _SAMPLING_FIELDS and v is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    values |= {name: tuple(values[name]) for name in ("stop", "stop_token_ids") if name in values}
    # Each further request of a trajectory gets its own seed.
    return replace(trajectory.sampling, seed=trajectory.sampling.seed + len(trajectory.asked), **values)


def _format_reply(
    trajectory: TrajectoryRequests, tokens: Tokens, completion: Completion, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    ids = [int(token) for span in completion.spans for token in span.tokens]
    logprobs = [float(p) for span in completion.spans if span.logprobs is not None for p in span.logprobs]
    text_ids = ids
    if completion.finish_reason == "stop" and not parameters.get("no_stop_trim", False) and ids:
        ends = {*trajectory.sampling.stop_token_ids, trajectory.run.tokenizer().eos_token_id}
        text_ids = ids[:-1] if ids[-1] in ends else ids
    skip = bool(parameters.get("skip_special_tokens", True))
    versions = [span.version.number for span in completion.spans if span.version is not None]
    return {
        "text": trajectory.run.tokenizer().decode(text_ids, skip_special_tokens=skip),
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": completion.finish_reason},
            "prompt_tokens": len(tokens),
            "completion_tokens": len(ids),
            "cached_tokens": completion.cached_tokens,
            "weight_version": str(versions[-1]) if versions else "0",
            "output_token_logprobs": [[p, token, None] for p, token in zip(logprobs, ids, strict=True)],
        },
    }


class GenerateState:
    """The state upstream's generate functions share: the checkpoint's tokenizer and the sampling parameters."""

    def __init__(self, args: Any) -> None:
        trajectory = _CURRENT.get()
        if trajectory is None:
            raise HookError("GenerateState must be created inside a generate function.")
        self.args = args
        self.aborted = False
        self.tokenizer = trajectory.run.tokenizer()
        self.sampling_params = sampling_params_dict(trajectory.sampling)
