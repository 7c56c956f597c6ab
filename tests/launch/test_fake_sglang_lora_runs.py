"""Runs whose adapters an SGLang-like server applies: killed, resumed, and compared with the uninterrupted run."""

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.backends.remote.fake_sglang import FakeSglang, serving
from tests.launch.small_run import everything, flags, miles, write_inputs

LORA = ("--lora-rank", "4", "--no-lora-merge", "--rollout-backend", "sglang")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@contextmanager
def running_server(inputs: Path) -> Iterator[tuple[FakeSglang, str]]:
    """A fake server in a thread of its own, and its address; it outlives the runs that use it."""
    ready, stop = threading.Event(), threading.Event()
    found: list[tuple[FakeSglang, str]] = []

    async def serve() -> None:
        vocab_size = json.loads((inputs / "config.json").read_text())["vocab_size"]
        fake = FakeSglang(inputs, max_running=16, vocab_size=vocab_size)
        async with serving(fake) as url:
            found.append((fake, url))
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize(
    "point",
    ["miles.train.optim.optimizer:Optimizer.step:6", "miles.backends.remote.adapter_update:AdapterUpdate.commit:3"],
    ids=["in a step", "in a publication"],
)
def test_a_killed_run_continues_to_the_bit_on_the_server_that_it_left(inputs, tmp_path, point):
    with running_server(inputs) as (fake, url):
        line = flags(inputs, tmp_path / "calm", *LORA, "--rollout-external-engine-addrs", url, steps=4)
        done = miles("train", *line)
        assert done.returncode == 0, done.stderr
        assert not fake.adapters, "a run that ends removes its adapter"
    with running_server(inputs) as (fake, url):
        line = flags(inputs, tmp_path / "run", *LORA, "--rollout-external-engine-addrs", url, steps=4)
        assert miles("train", *line, kill_at=point).returncode == -signal.SIGKILL
        left = set(fake.adapters)
        assert left, "nobody has removed the adapter of a run that was killed"
        again = miles("train", *line)
        assert again.returncode == 0, again.stderr
        assert set(fake.adapters) <= left  # the resumed run used names of its own
    assert everything(tmp_path / "run") == everything(tmp_path / "calm")
