"""The self-test of weight updates finds a server that serves other weights than it was sent, before step 1."""

import asyncio

import pytest
import torch
from tests.backends.remote.harness import running_pool, url_of, weights_of

from miles.core.errors import SyncError


def publish(folders, hosted):
    async def run():
        async with running_pool(folders.a, [url_of(hosted)]):
            pass

    asyncio.run(run())


def test_a_sound_server_holds_the_first_version_to_the_bit(pair, folders):
    publish(folders, pair[0])
    served, wanted = pair[0].engine.weights(), weights_of(folders.a)
    assert served.keys() == wanted.keys() and all(torch.equal(served[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("count", "from_commit"), [(1, 1), (1, 2), (None, 1), (None, 2)])
def test_a_server_that_serves_other_weights_is_refused(pair, folders, monkeypatch, count, from_commit):
    """``count`` tensors keep their values from the given commit on: the first is the noise, the second the update."""
    engine, commits = pair[0].engine, []
    real = type(engine).commit

    def commit(self):
        own = {name: tensor.clone() for name, tensor in self.weights().items()}
        real(self)
        commits.append(self)
        if len(commits) >= from_commit:
            with torch.no_grad():
                for name in list(own)[:count]:
                    self.weights()[name].copy_(own[name])

    monkeypatch.setattr(type(engine), "commit", commit)
    with pytest.raises(SyncError, match="engine 0 does not serve the weights it was sent"):
        publish(folders, pair[0])
