"""What tests of runs share: a run is not drawn unless a test looks at the picture."""

from collections.abc import Iterator

import pytest
from tests.launch.small_run import undrawn

from miles.launch.commands import train


@pytest.fixture(scope="session", autouse=True)
def runs_are_not_drawn() -> Iterator[None]:
    """A picture takes longer than most of the runs here. ``miles(..., drawn=True)`` draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "plot_curves", undrawn)
        yield
