"""What tests of device code share."""

import zlib
from collections.abc import Iterator

import pytest
import torch
from tests.kernels import interpreter  # noqa: F401  kernels run quicker


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> None:
    """Every test has random numbers of its own, the same each time: one that fails fails again."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody has written yet holds no number: what a kernel forgets is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
