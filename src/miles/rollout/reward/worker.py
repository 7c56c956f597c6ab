"""The child process that grades: requests come in, pickled; for each, one line of JSON goes out.

``{"load": module}`` imports it; ``{"call": "module:function", "args": [...], "seconds": n}`` calls. The
answer is ``{"value": ...}``, ``{"bad_label": why}`` or ``{"error": what}``. It ends with its input, and by
the kernel's hand when a call takes more than its CPU time, even if whoever asked is gone.

Only what this program hands down is unpickled (metadata may hold tuples, which JSON would lose); what
comes back from a process that has read a policy's text is never more than JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
from typing import Any

from miles.rollout.reward.score import BadLabel


def main() -> None:
    """Answer until the input ends."""
    _limit_memory(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not look like an answer
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answers.write(json.dumps(_answer(request)) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "load" in request:
            importlib.import_module(request["load"])
            return {"value": None}
        module, _, name = request["call"].partition(":")
        function = getattr(importlib.import_module(module), name)
        # Counted in CPU seconds and answered by the kernel: also a call that never comes back to Python ends.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"] + 1.0)
        try:
            return {"value": function(*request["args"])}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except BadLabel as error:
        return {"bad_label": str(error)}
    except Exception as error:  # whatever a grader may raise is its answer
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _limit_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # no such limits on this system; the time limit still holds
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
