"""What all tests share: the option that rewrites checked-in files, and an interpreter where there is no accelerator."""

import os

import pytest
import torch

# Device code is read by its compiler, or its interpreter, when it is first imported: before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite the checked-in lists that tests compare with")


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether checked-in files are to be rewritten."""
    return bool(request.config.getoption("--regenerate"))
