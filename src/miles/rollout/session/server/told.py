"""A session as JSON: what it is, and everything that was sampled in it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from miles.core.types import Array, Span, Status
from miles.rollout.session.server.entry import Entry


def session_body(entry: Entry, url: str) -> dict[str, Any]:
    """What a session is and how far it has come. ``base_url`` is OpenAI's, ``anthropic_base_url`` the other one's."""
    terms, tree = entry.terms, entry.session.tree
    prompt = entry.session.prompt
    return {
        "id": entry.id,
        "object": "session",
        "base_url": f"{url}/v1",
        "anthropic_base_url": url,
        "match": terms.match,
        "hold": terms.held,
        "sampling": asdict(terms.sampling),
        "metadata": dict(terms.metadata),
        "prompt": None if prompt is None else {"id": prompt.id, "messages": list(prompt.messages)},
        "max_turns": terms.max_turns,
        "max_tokens": terms.max_tokens,
        "turns": entry.turns,
        "tokens": entry.written,
        "running": entry.running,
        "branches": len(tree.leaves()),
        "status": str(entry.status),
        "failure": entry.failure,
        "notes": entry.notes,
    }


def trajectory_body(entry: Entry, *, extras: bool) -> dict[str, Any]:
    """Every branch in spans: whose tokens, which, and of the policy's the log-probs and the version that drew them."""
    trajectory = entry.session.trajectory(status=entry.status)
    return {
        "id": entry.id,
        "object": "trajectory",
        "status": str(trajectory.status),
        "metadata": {**entry.terms.metadata, **trajectory.metadata},
        "branches": [{"spans": [_span(span, extras) for span in branch]} for branch in trajectory.branches],
    }


def nothing_sampled(entry: Entry) -> bool:
    """Has the session no conversation to show, not even a prompt's?"""
    return entry.status is Status.FAILED and not len(entry.session.tree) and entry.session.prompt is None


def _span(span: Span, extras: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"author": str(span.author), "tokens": span.tokens.tolist()}
    if span.logprobs is not None and span.version is not None:
        body["logprobs"] = [float(x) for x in span.logprobs]
        body["version"] = {"policy": span.version.policy, "number": span.version.number}
    if extras and span.extras:
        body["extras"] = _arrays(span.extras)
    return body


def _arrays(extras: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays as their bytes in base64, with what is needed to read them: numpy.frombuffer, then reshape."""
    return {
        name: {
            "dtype": str(values.dtype),
            "shape": list(values.shape),
            "base64": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode(),
        }
        for name, values in extras.items()
    }
