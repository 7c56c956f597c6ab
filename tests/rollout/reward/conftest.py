"""The worker processes every reward test may share."""

from collections.abc import Iterator

import pytest

from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.grader_pool import GraderPool


@pytest.fixture(scope="session")
def means() -> Iterator[GraderContext]:
    workers = GraderPool(1, seconds=30.0)
    yield GraderContext(pool=workers)
    workers.close()
