"""What a hook raises names the hook."""

import asyncio

import pytest

from miles.core.errors import HookError, HookRuntimeError
from miles.hooks.guard import HookExit, guard_hook


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def raising(error):
    def hook():
        raise error

    async def async_hook():
        raise error

    return hook, async_hook


def call(error, *, is_async, is_contained=False):
    hook = guard_hook(raising(error)[is_async], "--flag mine:hook", is_async=is_async, is_contained=is_contained)
    return asyncio.run(hook()) if is_async else hook()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (BrokenPipeError(32, "Broken pipe"), r"BrokenPipeError: \[Errno 32\] Broken pipe"),
        (SystemExit(0), "SystemExit: 0"),
        (asyncio.CancelledError(), "CancelledError"),
        (ZeroDivisionError("no"), "ZeroDivisionError: no"),
        (Unprintable(), "Unprintable: "),
    ],
)
def test_an_error_of_a_hook_is_a_sentence_with_its_name_and_line(error, says, is_async):
    with pytest.raises(HookRuntimeError, match=rf"--flag mine:hook raised {says}.*test_guard.py, line \d+"):
        call(error, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
def test_where_failures_are_handled_only_what_is_no_exception_is_replaced(is_async):
    with pytest.raises(ZeroDivisionError):
        call(ZeroDivisionError("no"), is_async=is_async, is_contained=True)
    with pytest.raises(HookExit, match="SystemExit: 3"):
        call(SystemExit(3), is_async=is_async, is_contained=True)


def test_an_error_for_the_user_passes_as_it_is():
    with pytest.raises(HookError, match=r"^as it is$"):
        call(HookError("as it is"), is_async=True)


def test_a_cancelled_hook_is_cancelled():
    async def waits():
        await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(guard_hook(waits, "mine", is_async=True)())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
