"""Options and hooks of all tests: regenerated lists, test tiers, a CPU-time limit, the Triton interpreter."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.tiers import (
    DEFAULT_EXAMPLES,
    EXTENDED_RUN,
    LIMIT_TOLERANCE,
    cpu_seconds,
    mark_tiers,
    measure_slowdown,
)

# Triton reads this when a kernel is first imported, which is before any test runs.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with interrupts ignored, nohup ignores hangups, and tests end endless runs by these.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# No deadline: how long an example takes depends on the machine, not on the code.
settings.register_profile("extended", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "default", settings.get_profile("extended"), max_examples=DEFAULT_EXAMPLES, derandomize=True, database=None
)
settings.load_profile("extended" if EXTENDED_RUN else "default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite the checked-in lists that tests compare with")
    parser.addoption("--remeasure", action="store_true", help="with --regenerate, measure again what a page states")
    parser.addoption(
        "--cpu-limit",
        type=float,
        default=None,
        metavar="SECONDS",
        help="fail a test that takes more CPU time than this and belongs into tests/extended.txt",
    )


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether checked-in files are to be rewritten."""
    return bool(request.config.getoption("--regenerate"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay until the end: a collector would walk over them for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_tiers(items)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    limit = pyfuncitem.config.getoption("--cpu-limit")
    started = cpu_seconds()
    result = yield
    taken = cpu_seconds() - started
    if limit is None or taken <= (allowed := limit * LIMIT_TOLERANCE):
        return result
    if taken > (allowed := allowed * measure_slowdown()):
        pytest.fail(
            f"took {taken:.1f} CPU-seconds, and a default test takes {limit:g}, and at most {allowed:.1f} on this "
            "machine while it is busy: make it quicker, or list it in tests/extended.txt",
            pytrace=False,
        )
    return result
