"""The hook watchdog: what ends a hook that blocks the main thread, and what it leaves alone."""

import signal
import subprocess
import sys
import threading

import pytest

from miles.core.errors import HookRuntimeError
from miles.hooks.guard import get_running_hook, guard_hook
from miles.launch.runtime import hook_watchdog
from miles.launch.runtime.hook_watchdog import HookWatchdog
from miles.launch.runtime.signals import StopSignal

PATIENCE = 60.0


def block() -> None:
    assert not threading.Event().wait(PATIENCE), "nobody has interrupted it"


def guarded(hook, source: str = "--flag mine:hook"):
    return guard_hook(hook, source, is_async=False)


def test_a_hook_that_blocks_the_main_thread_is_ended_with_its_name():
    handler = signal.getsignal(signal.SIGURG)
    with (
        pytest.raises(HookRuntimeError, match=r"--flag mine:hook has blocked the run for .* s \(--stall-timeout\)"),
        HookWatchdog(0.2, lambda: None, print).watching(),
    ):
        guarded(block)()
    assert signal.getsignal(signal.SIGURG) is handler
    assert get_running_hook(threading.get_ident()) is None


def test_after_a_stop_signal_a_hook_has_a_few_seconds_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hook_watchdog, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(hook_watchdog, "_MAX_INTERVAL", 0.05)
    printed: list[str] = []
    with (
        pytest.raises(StopSignal) as stopped,
        HookWatchdog(1e6, lambda: signal.SIGTERM, printed.append).watching(),
    ):
        guarded(block)()
    assert stopped.value.number == signal.SIGTERM
    (line,) = printed
    assert line.startswith("miles: --flag mine:hook has blocked the run for") and "asked to stop" in line


def test_what_is_no_hook_is_not_interrupted_and_neither_are_many_short_hooks():
    done = threading.Event()
    calls: list[int] = []

    def count() -> None:
        calls.append(1)
        done.wait(0.005)

    short = guarded(count)
    with HookWatchdog(0.2, lambda: None, print).watching():
        for _ in range(100):  # longer than the limit together
            short()
        done.wait(0.5)
    assert len(calls) == 100


def test_a_hook_in_another_thread_is_left_to_its_own_deadline():
    release = threading.Event()
    with HookWatchdog(0.1, lambda: None, print).watching():
        thread = threading.Thread(target=guarded(lambda: release.wait(PATIENCE)))
        thread.start()
        threading.Event().wait(0.4)
        release.set()
        thread.join()


STUBBORN = """
import threading
from miles.hooks.guard import guard_hook
from miles.launch.runtime import hook_watchdog
hook_watchdog._EXIT_SECONDS = 0.2

def catch():
    while True:
        try:
            threading.Event().wait()
        except Exception:
            print("caught", flush=True)

with hook_watchdog.HookWatchdog(0.2, lambda: None, lambda text: print(text, flush=True)).watching():
    guard_hook(catch, "--flag mine:catch", is_async=False)()
"""


def test_a_hook_that_catches_the_exception_is_ended_with_the_process():
    done = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stdout.startswith("caught\nmiles: --flag mine:catch has blocked the run for")
