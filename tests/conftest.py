"""What all tests share: the option that rewrites checked-in files instead of comparing with them."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite the checked-in lists that tests compare with")


@pytest.fixture
def regenerate(request: pytest.FixtureRequest) -> bool:
    """Whether checked-in files are to be rewritten."""
    return bool(request.config.getoption("--regenerate"))
