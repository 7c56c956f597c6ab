"""Checkpoints that the server's tests share."""

from pathlib import Path

import pytest
from tests.backends.native.server.tiny import write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer."""
    return write_model(Path(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_model(Path(tmp_path_factory.mktemp("other")), seed=1)
