"""Errors of user hooks: whatever a hook raises becomes an error that names the hook and the line.

``SystemExit`` and a ``CancelledError`` that nobody asked for are failures of the hook like any other exception: a hook
can neither end the process nor make its trajectory vanish.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

from miles.core.errors import HookRuntimeError, MilesError, describe_error


@dataclass(frozen=True, slots=True, eq=False)
class RunningHook:
    """A call of a synchronous hook that has not returned, and when it began (``time.monotonic``)."""

    source: str
    started: float


_running: dict[int, list[RunningHook]] = {}
"""Thread -> the hooks it is in, the outermost first."""


def get_running_hook(thread: int) -> RunningHook | None:
    """The outermost synchronous hook that a thread is in."""
    return next(iter(_running.get(thread, ())), None)


class HookExit(Exception):
    """What a hook raised that is not an ``Exception``, such as SystemExit, for a caller that handles failures."""


def guard_hook(hook: Callable[..., Any], source: str, *, is_async: bool, is_contained: bool = False) -> Any:
    """Wrap ``hook`` so that it raises MilesErrors alone, which name ``source``.

    Where its caller handles failures (``is_contained``), exceptions pass as they are, and the rest becomes HookExit.
    """
    guard = _guard_async if is_async else _guard_sync
    guarded = guard(hook, source, is_contained)
    resume = getattr(hook, "resume", None)
    if is_async and resume is not None:  # core.protocols.ResumableGenerate
        guarded.resume = guard(resume, source, is_contained)
    return guarded


def _guard_sync(hook: Callable[..., Any], source: str, is_contained: bool) -> Any:
    @wraps(hook, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        calls = _running.setdefault(threading.get_ident(), [])
        calls.append(RunningHook(source, time.monotonic()))
        try:
            return hook(*args, **kwargs)
        except (Exception, SystemExit, GeneratorExit, asyncio.CancelledError) as error:
            _raise_failure(error, hook, source, is_contained)
        finally:
            calls.pop()

    return call


def _guard_async(hook: Callable[..., Any], source: str, is_contained: bool) -> Any:
    @wraps(hook, updated=())
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await hook(*args, **kwargs)
        except asyncio.CancelledError as error:
            if is_cancelling():
                raise
            _raise_failure(error, hook, source, is_contained)
        except (Exception, SystemExit) as error:
            _raise_failure(error, hook, source, is_contained)

    return call


def is_cancelling() -> bool:
    """Whether somebody has asked the current task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raise_failure(error: BaseException, hook: Callable[..., Any], source: str, is_contained: bool) -> NoReturn:
    if isinstance(error, MilesError) or (is_contained and isinstance(error, Exception)):
        raise error
    if is_contained:
        raise HookExit(describe_error(error)) from error
    raise HookRuntimeError(
        f"{source} raised {describe_error(error)}{_locate(error, hook)}; fix it, and the same command resumes the run"
    ) from error


def _locate(error: BaseException, hook: Callable[..., Any]) -> str:
    """The line of the hook's own file that raised it, else the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(hook, "__code__", None) or getattr(getattr(hook, "__call__", None), "__code__", None)  # noqa: B004
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    if not (own or frames):
        return ""
    frame = (own or frames)[-1]
    return f" ({os.path.relpath(frame.filename)}, line {frame.lineno})"
