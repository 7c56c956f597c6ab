"""The servers the suite talks to, checks after every test, and what is kept of a run for docs/http_api.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.server_api import results
from tests.server_api.differences import difference_of
from tests.server_api.live_servers import Wire, miles, sglang
from tests.server_api.tiny import make

BOTH = [pytest.param("miles"), pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The checkpoints: a model, the same with other weights, and one with experts."""
    root = tmp_path_factory.mktemp("checkpoints")
    return SimpleNamespace(
        a=make(root / "a", 0), b=make(root / "b", 1), experts=make(root / "experts", 2, experts=True)
    )


def _started(kind: str, folder: Path, logs: Path, *flags: str) -> AbstractContextManager[Wire]:
    return miles(folder) if kind == "miles" else sglang(folder, logs / "sglang.log", *flags)


@pytest.fixture(scope="session", params=BOTH)
def _any_server(request: pytest.FixtureRequest, folders, tmp_path_factory) -> Iterator[Wire]:
    with _started(request.param, folders.a, tmp_path_factory.mktemp("server")) as wire:
        yield wire


@pytest.fixture(scope="session", params=BOTH)
def _any_server_with_experts(request: pytest.FixtureRequest, folders, tmp_path_factory) -> Iterator[Wire]:
    logs = tmp_path_factory.mktemp("experts")
    with _started(request.param, folders.experts, logs, "--enable-return-routed-experts") as wire:
        yield wire


@pytest.fixture
def server(_any_server: Wire, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """A server with checkpoint ``a``, idle and not paused, before and after."""
    yield from _lent(_any_server, request)


@pytest.fixture
def expert_server(_any_server_with_experts: Wire, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """The same with experts."""
    yield from _lent(_any_server_with_experts, request)


def _lent(wire: Wire, request: pytest.FixtureRequest) -> Iterator[Wire]:
    differs = difference_of(request.node.originalname, wire.kind)
    if differs is not None and differs.fatal:
        pytest.skip(differs.why)
    if differs is not None:
        request.applymarker(pytest.mark.xfail(reason=differs.why, strict=True))
    yield wire
    wire.post("/continue_generation")
    wire.post("/abort_request", {"abort_all": True})
    wire.until(lambda: not wire.busy())
    if wire.hosted is not None:
        wire.hosted.engine.check()


@pytest.fixture
def restored(server: Wire, folders) -> Iterator[Wire]:
    """A server whose weights a test may change."""
    yield server
    server.post("/continue_generation")
    server.ok("/update_weights_from_disk", model_path=str(folders.a), weight_version="default")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = (yield).get_result()
    if report.when == "call" or report.outcome == "skipped":
        results.keep(item, report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--regenerate"):
        results.store()
