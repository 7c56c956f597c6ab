"""Samples with images for the trainer's tests: a group of one image, several turns with images, text alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from miles.algo.loss_aggregation import mean_per_trajectory
from miles.core.media import ImageInput, PlacedImage, make_image_input
from miles.core.types import Sample
from miles.train.batch_tensors import MicroBatch, flatten_batch, pack_micro_batch

IMAGE = 60
PATCH = 3 * 2 * 4 * 4
CPU = torch.device("cpu")


def image(seed: int, rows: int = 4, columns: int = 6) -> ImageInput:
    """Random patches, as Qwen's processors return them."""
    pixels = np.random.default_rng(seed).standard_normal((rows * columns, PATCH), np.float32)
    grid = np.array([[1, rows, columns]])
    return make_image_input({"pixel_values": pixels, "image_grid_thw": grid}, rows * columns // 4)


def sample(
    parts: Sequence[tuple[int, bool] | ImageInput],
    *,
    seed: int,
    prompt_id: int = 0,
    trajectory: int = 0,
    advantage: float = 1.0,
) -> Sample:
    """Runs of random tokens, trained or not, and images, one after the other; tokens come of ``seed``."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    mask: list[bool] = []
    images: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, ImageInput):
            images.append(PlacedImage(start=len(tokens), length=part.num_features, image=part))
            tokens += [IMAGE] * part.num_features
            mask += [False] * part.num_features
        else:
            count, trained = part
            tokens += rng.integers(0, 50, count).tolist()
            mask += [trained] * count
    trained_N = np.array(mask)
    return Sample(
        prompt_id=prompt_id,
        trajectory=trajectory,
        tokens=np.array(tokens, np.int32),
        mask=trained_N,
        logprobs=np.where(trained_N, np.float32(-4), np.float32(0)),
        advantages=np.where(trained_N, np.float32(advantage), np.float32(0)),
        versions=np.where(trained_N, 0, -1).astype(np.int32),
        images=tuple(images),
    )


def square(seed: int) -> ImageInput:
    """Random pixels of an image of 24 x 24, as Gemma's processors return them."""
    pixels = np.random.default_rng(seed).standard_normal((1, 3, 24, 24), np.float32)
    return make_image_input({"pixel_values": pixels}, 9)


def padded(seed: int, rows: int = 4, columns: int = 6) -> ImageInput:
    """Random pixels of patches with their columns and rows, as Gemma 4's processor returns them."""
    count = rows * columns
    pixels, at = np.zeros((1, 28, 3 * 4 * 4), np.float32), np.full((1, 28, 2), -1)
    pixels[0, :count] = np.random.default_rng(seed).random((count, 3 * 4 * 4), np.float32)
    at[0, :count] = np.stack((np.arange(count) % columns, np.arange(count) // columns), 1)
    return make_image_input({"pixel_values": pixels, "image_position_ids": at}, count // 4)


A, B, C = image(1), image(2, 2, 4), image(3)
"""A and C have the same size."""


def images_for(family: str) -> tuple[ImageInput, ImageInput, ImageInput]:
    """Three images that a model of a family takes; the first and the last have the same size."""
    if family == "gemma4":
        return padded(1), padded(2, 2, 4), padded(3)
    return (square(1), square(2), square(3)) if family == "gemma3" else (A, B, C)


def group(prompt_id: int, first: ImageInput, count: int, start: int = 0) -> list[Sample]:
    """Samples of one prompt with an image; the tokens of their replies differ."""
    head = sample([(5, False), first, (4, False)], seed=100 + prompt_id)
    out: list[Sample] = []
    for number in range(count):
        seed = 10 * prompt_id + number
        tail = sample([(1, False), (3 + number, True)], seed=seed, advantage=0.5 - number)
        out.append(join(head, tail, prompt_id=prompt_id, trajectory=start + number))
    return out


def join(head: Sample, tail: Sample, **origin: int) -> Sample:
    """One sample after the other."""
    names = ("tokens", "mask", "logprobs", "advantages", "versions")
    arrays = {name: np.concatenate((getattr(head, name), getattr(tail, name))) for name in names}
    images = (*head.images, *(placed.shift(len(head)) for placed in tail.images))
    return replace(head, **arrays, images=images, **origin)


def mixed(family: str = "") -> list[Sample]:
    """Two groups that differ in the image alone, an image in a later turn and one after the last, and text alone."""
    a, b, c = images_for(family)
    turns = [(3, False), b, (2, True), (1, False), a, (1, False), (4, True), (2, False), c, (1, False)]
    return [
        *group(0, a, 3),
        *[replace(s, trajectory=s.trajectory + 3) for s in swap(group(0, a, 2), c)],
        sample(turns, seed=7, prompt_id=1, trajectory=5, advantage=-0.7),
        sample([(6, False), (5, True)], seed=8, prompt_id=2, trajectory=6, advantage=0.3),
    ]


def swap(samples: Sequence[Sample], other: ImageInput) -> list[Sample]:
    """The same tokens with another image."""
    return [replace(s, images=tuple(replace(p, image=other) for p in s.images)) for s in samples]


def pack(samples: Sequence[Sample], chosen: Sequence[int] | None = None, *, share: bool = False) -> MicroBatch:
    flat = flatten_batch([[s] for s in samples], mean_per_trajectory)
    every = list(range(len(samples)) if chosen is None else chosen)
    return pack_micro_batch(flat, every, device=CPU, replay=False, share=share, min_shared=2)
