"""Two native servers with one tiny checkpoint, and another checkpoint to update them to."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.server_api.live_servers import Hosted
from tests.server_api.tiny import make


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("checkpoints")
    return SimpleNamespace(a=make(root / "a", 0), b=make(root / "b", 1))


@pytest.fixture(scope="session")
def pair(folders) -> Iterator[tuple[Hosted, Hosted]]:
    """Their weights are whatever the test before left: every test publishes its own first."""
    made = [Hosted(folders.a, "--engine-kv-tokens", "16384", "--incremental-streaming-output") for _ in range(2)]
    yield made[0], made[1]
    for hosted in made:
        hosted.close()


@pytest.fixture(autouse=True)
def awake(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        for hosted in request.getfixturevalue("pair"):
            hosted.call(hosted.engine.abort())
            hosted.call(hosted.engine.wake())
            hosted.call(hosted.engine.resume())
