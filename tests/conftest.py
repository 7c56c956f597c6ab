"""What all tests share: the option that rewrites checked-in files, no clock on examples, an interpreter for kernels."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Device code is read by its compiler, or its interpreter, when it is first imported: before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite the checked-in lists that tests compare with")


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether checked-in files are to be rewritten."""
    return bool(request.config.getoption("--regenerate"))
