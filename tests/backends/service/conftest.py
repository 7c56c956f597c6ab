"""A small checkpoint, and a service over it that the tests of a file share."""

from pathlib import Path

import pytest
from tests.backends.native.server.tiny import write_model
from tests.backends.service.live import LiveService, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def live(model, tmp_path_factory) -> LiveService:
    with serving(model, tmp_path_factory.mktemp("service")) as running:
        yield running
