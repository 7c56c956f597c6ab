"""The worker processes every reward test may share."""

from collections.abc import Iterator

import pytest

from miles.rollout.reward.means import Means
from miles.rollout.reward.workers import Workers


@pytest.fixture(scope="session")
def means() -> Iterator[Means]:
    workers = Workers(1, seconds=30.0)
    yield Means(workers=workers)
    workers.close()
