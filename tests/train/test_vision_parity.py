"""Exact parity with images: engine and trainer agree to the last bit, before and after the tower was trained."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.image_requests import ask, build_engine, generate
from tests.models.vision.small_vision import Prompt, place, vision_model, vision_twin
from tests.train.small_trainer import worker
from tests.train.vision_samples import C, images_for

from miles.algo.advantages import build_samples
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.engine.engine import NativeEngine
from miles.core.errors import ParityError
from miles.core.media import Images, join_images
from miles.core.types import Author, Batch, Reward, Sample, Span, Status, Trajectory
from miles.kernels.numerics import BATCH_INVARIANT

TURNS = 4


def turns_of(kind: str) -> tuple[tuple[Prompt, Prompt], ...]:
    """The prompt and the environment's answer of each conversation; the first two differ in the image alone."""
    a, b, c = images_for(kind)
    return (
        (place([5, a, 4], 1), place([1, b, 2], 2)),
        (place([5, c, 4], 1), place([3], 3)),
        (place([b, 2, a, 1], 4), place([2, c, 1], 5)),
        (place([9], 6), place([1, a, 1], 7)),
    )


def as_span(author: Author, part: Prompt) -> Span:
    return Span(author=author, tokens=part.tokens.astype(np.int32), images=part.images)


def join(spans: Sequence[Span]) -> tuple[np.ndarray, Images]:
    return np.concatenate([s.tokens for s in spans]), join_images((len(s), s.images) for s in spans)


def roll_out(engine: NativeEngine, kind: str, seed: int) -> list[Sample]:
    """Two samples of each conversation, of two turns each."""
    turns = turns_of(kind)
    branches = [[as_span(Author.PROMPT, prompt)] for prompt, _ in turns for _ in range(2)]
    for turn in range(2):
        asked = [ask(Prompt(*join(spans)), seed + number, 5) for number, spans in enumerate(branches)]
        for number, (spans, answer) in enumerate(zip(branches, generate(engine, asked), strict=True)):
            spans += answer.spans
            if not turn:
                spans.append(as_span(Author.ENV, turns[number // 2][1]))
    samples: list[Sample] = []
    for number, spans in enumerate(branches):
        trajectory = Trajectory(
            branches=(tuple(spans),), status=Status.COMPLETED, reward=Reward(value=0.0), index=number
        )
        advantage = 0.7 - number % 2
        samples += build_samples(number // 2, trajectory, advantage=advantage, trained_author=Author.POLICY)
    return samples


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4"])
@pytest.mark.parametrize("share", [False, True])
def test_log_probs_of_engine_and_trainer_are_equal_to_the_bit_at_every_version(kind: str, share: bool) -> None:
    decoder = vision_twin(vision_model(kind), numerics=BATCH_INVARIANT)
    with torch.no_grad():
        engine = build_engine(decoder, numerics=BATCH_INVARIANT, prefill_chunk=16)
    trainer = worker(LocalModel(decoder), train={"share_prefix": share, "max_tokens_per_gpu": 90})
    tower = decoder.get_parameter("vision.blocks.0.attention.qkv.weight").clone()
    for version in range(2):
        samples = roll_out(engine, kind, 10 * version)
        assert {len(s.images) for s in samples} == {1, 2, 3}
        report = asyncio.run(trainer.step(Batch(step=version, samples=tuple(samples), num_groups=TURNS)))
        assert report.metrics["parity_max_abs"] == 0.0
        assert report.metrics["parity_tokens"] == sum(int(s.mask.sum()) for s in samples)
        if share:
            assert report.metrics["tokens_shared"] > 0
        with torch.no_grad():
            Tiny().publish(engine, decoder, version + 1)
    assert not torch.equal(tower, decoder.get_parameter("vision.blocks.0.attention.qkv.weight"))


def test_another_image_than_the_engine_saw_is_found() -> None:
    decoder = vision_twin(vision_model("qwen3_vl"), numerics=BATCH_INVARIANT)
    with torch.no_grad():
        samples = roll_out(build_engine(decoder, numerics=BATCH_INVARIANT), "qwen3_vl", 0)
    placed = samples[0].images[0]
    wrong = replace(samples[0], images=(replace(placed, image=C), *samples[0].images[1:]))
    with pytest.raises(ParityError):
        trainer = worker(LocalModel(decoder))
        asyncio.run(trainer.step(Batch(step=0, samples=(wrong, *samples[1:]), num_groups=TURNS)))
