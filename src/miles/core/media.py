"""Images of a request: processed pixels by content hash, and their places among the tokens.

An image takes a run of tokens. Those of them that are the model's image placeholder are replaced by the features that
the vision tower computes, in order; others (row breaks, tile separators) are ordinary tokens. Placeholders outside of
such runs, which a policy may sample, are ordinary tokens too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MediaKind = Literal["image", "video"]

# Odd, and large enough that the keys of an image's tokens stay apart: the run may hold tokens beside placeholders.
_TOKEN_FACTOR = 0x9E3779B97F


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageInput:
    """One processed image or video: the arrays that a vision tower reads, by the names of the checkpoint's processor.

    ``digest`` identifies the arrays; ``source`` is the SHA-256 of the file they were made from, empty if unknown.
    ``num_features`` is the number of placeholder tokens that they fill. Two inputs are equal if their digests are.
    """

    digest: str
    num_features: int
    arrays: Mapping[str, Array]
    kind: MediaKind = "image"
    source: str = ""

    def __post_init__(self) -> None:
        if self.num_features < 1:
            raise ValueError(f"an image must fill at least one token, not {self.num_features}")
        for array in self.arrays.values():
            array.flags.writeable = False
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInput) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def make_image_input(
    arrays: Mapping[str, Array], num_features: int, *, kind: MediaKind = "image", source: str = ""
) -> ImageInput:
    """Build an ``ImageInput``, whose digest is ``compute_digest`` of its arrays."""
    return ImageInput(
        digest=compute_digest(arrays, kind), num_features=num_features, arrays=arrays, kind=kind, source=source
    )


def compute_digest(arrays: Mapping[str, Array], kind: MediaKind = "image") -> str:
    """SHA-256 of the kind, and of the names, types, shapes and bytes of processed arrays.

    >>> compute_digest({"a": np.zeros(2)}) == compute_digest({"a": np.zeros((2, 1))})
    False
    """
    state = hashlib.sha256(kind.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        state.update(array.view(np.uint8).data if array.size else b"")
    return state.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image and the run of tokens that it takes, from ``start`` on."""

    start: int
    length: int
    image: ImageInput

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < self.image.num_features:
            raise ValueError(
                f"an image of {self.image.num_features} features cannot take {self.length} tokens from {self.start} on"
            )

    @property
    def end(self) -> int:
        """One past its last token."""
        return self.start + self.length

    def shift(self, by: int) -> PlacedImage:
        """Return it ``by`` tokens further on."""
        return PlacedImage(start=self.start + by, length=self.length, image=self.image)


Images = tuple[PlacedImage, ...]


def check_placement(images: Sequence[PlacedImage], num_tokens: int) -> None:
    """Raise a ValueError unless the images are in order, apart from each other, and within so many tokens."""
    end = 0
    for number, placed in enumerate(images):
        if placed.start < end:
            raise ValueError(f"image {number} starts at token {placed.start}, before the end of the one before it")
        end = placed.end
    if end > num_tokens:
        raise ValueError(f"image {len(images) - 1} ends at token {end} of {num_tokens}")


def join_images(parts: Iterable[tuple[int, Images]]) -> Images:
    """The images of concatenated parts, each given by its number of tokens and its images."""
    out: list[PlacedImage] = []
    start = 0
    for length, images in parts:
        out += (placed.shift(start) for placed in images)
        start += length
    return tuple(out)


def find_placeholders(tokens: Array, placed: PlacedImage, placeholder: int) -> NDArray[np.int64]:
    """The tokens that an image's features replace; ValueError unless there is one for each feature."""
    at = placed.start + np.flatnonzero(np.asarray(tokens)[placed.start : placed.end] == placeholder)
    if len(at) != placed.image.num_features:
        raise ValueError(
            f"{len(at)} placeholder tokens from token {placed.start} on for an image of "
            f"{placed.image.num_features} features"
        )
    return at


def prefix_keys(tokens: Array, images: Sequence[PlacedImage]) -> NDArray[np.int64]:
    """Keys that are equal where a prefix is: tokens, and negative numbers from token and digest where an image is.

    Two prompts with equal tokens and other images differ from the first token of the image on.
    """
    keys = np.array(tokens, np.int64)
    for placed in images:
        mixed = _digest_numbers(placed.image.digest, placed.length) + keys[placed.start : placed.end] * _TOKEN_FACTOR
        keys[placed.start : placed.end] = -1 - (mixed & ((1 << 62) - 1))
    return keys


@lru_cache(maxsize=256)
def _digest_numbers(digest: str, length: int) -> NDArray[np.int64]:
    """Consecutive numbers, of which the first has 60 bits of the digest."""
    numbers = int(digest[:15], 16) + np.arange(length, dtype=np.int64)
    numbers.flags.writeable = False
    return numbers
