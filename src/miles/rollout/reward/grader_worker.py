"""Grader worker process: reads pickled requests, writes one line of JSON for each.

``{"load": module}`` imports it; ``{"call": "module:function", "args": [...], "seconds": n}`` calls. The reply is
``{"value": ...}``, ``{"bad_label": why}`` or ``{"error": what}``. The process ends with its input, and a CPU timer
kills it when a call exceeds its time, even if the parent is gone.

Only requests of the parent are unpickled (metadata may hold tuples, which JSON would lose); replies of a process that
has handled a policy's text are never more than JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
from typing import Any

from miles.rollout.reward.types import BadLabel


def main() -> None:
    """Serve requests until the input ends."""
    _limit_memory(int(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library's prints must not mix with the replies
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        replies.write(json.dumps(_handle(request)) + "\n")
        replies.flush()


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "load" in request:
            importlib.import_module(request["load"])
            return {"value": None}
        module, _, name = request["call"].partition(":")
        function = getattr(importlib.import_module(module), name)
        # CPU seconds, enforced by the kernel, so that a call which never returns to Python ends too.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"] + 1.0)
        try:
            return {"value": function(*request["args"])}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except BadLabel as error:
        return {"bad_label": str(error)}
    except Exception as error:  # reported to the parent
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # no rlimits on this platform; the time limit still applies
        return
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
