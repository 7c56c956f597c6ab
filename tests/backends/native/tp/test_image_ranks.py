"""Images in a tensor-parallel engine: answers are those of one rank, and pixels go to the other ranks once."""

import asyncio
import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest
from tests.backends.native.conftest import Tiny
from tests.backends.native.image_requests import (
    ask,
    build_engine,
    generate,
    images,
    logprobs_of,
    pair,
    requests,
    response_of,
)
from tests.backends.native.test_images import changed
from tests.backends.native.tp.test_runner import shared
from tests.models.vision.small_vision import place

from miles.backends.native.engine.engine import NativeEngine
from miles.cluster import spmd

KIND = "qwen3_vl"
OPTIONS = {"kv_tokens": 72, "max_running": 6, "page_size": 4, "prefill_chunk": 9}


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    multiprocessing.set_forkserver_preload(["miles.backends.native.tp.worker", "tests.launch.small_run"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spmd, "START_METHOD", "forkserver")
        with shared(pair(KIND)[1].spec, 2, depth=1, **OPTIONS) as ranks:
            yield ranks


@pytest.fixture(autouse=True)
def first_weights(engine: NativeEngine) -> None:
    """Every test begins with weights whose tower is new, and so without features."""
    Tiny().publish(engine, changed(pair(KIND)[1], "vision."))
    Tiny().publish(engine, pair(KIND)[1])


class SentPixels:
    """Counts the bytes of pixels in the batches that go to the other ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: NativeEngine) -> None:
        self.digests: list[str] = []
        strip = engine._runner._strip

        def count(batch):
            batch = strip(batch)
            if batch.vision is not None:
                self.digests += [image.digest for image in batch.vision.images if image.nbytes]
            return batch

        monkeypatch.setattr(engine._runner, "_strip", count)


def same(answers, others) -> None:
    for one, other in zip(answers, others, strict=True):
        np.testing.assert_array_equal(response_of(one), response_of(other))
        np.testing.assert_allclose(logprobs_of(one), logprobs_of(other), atol=1e-4)


def test_answers_are_those_of_one_rank_also_after_preemption(engine, monkeypatch):
    sent = SentPixels(monkeypatch, engine)
    asked = requests(KIND, new=16)
    same(generate(engine, asked), generate(build_engine(pair(KIND)[1], **OPTIONS), asked))
    assert engine.stats()["preemptions"] > 0
    assert sorted(sent.digests) == sorted(image.digest for image in images(KIND))


def test_new_weights_drop_features_on_every_rank_if_the_tower_changed(engine, monkeypatch):
    sent = SentPixels(monkeypatch, engine)
    decoder, asked = pair(KIND)[1], [ask(place([3, *images(KIND)[:1], 5], 1))]
    for weights, times in ((decoder, 1), (changed(decoder, "layers."), 1), (changed(decoder, "vision."), 2)):
        Tiny().publish(engine, weights)
        same(generate(engine, asked), generate(build_engine(weights), asked))
        assert len(sent.digests) == times


def test_ranks_that_slept_encode_images_again(engine, monkeypatch):
    sent = SentPixels(monkeypatch, engine)
    asked = [ask(place([3, *images(KIND)[:1], 5], 1))]
    before = generate(engine, asked)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    same(generate(engine, asked), before)
    assert len(sent.digests) == 2
