"""Images of a request: digests, places among the tokens, and keys of prefixes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.media import PlacedImage, check_placement, find_placeholders, join_images, make_image_input, prefix_keys
from miles.core.serialization import CORE_TYPES, Codec
from miles.core.types import Author, Span, Version

PLACEHOLDER = 9


def image(value: float = 0.0, features: int = 2):
    return make_image_input({"pixel_values": np.full((4, 3), value, np.float32)}, features)


def test_digest_is_that_of_the_content() -> None:
    assert image(1.0) == image(1.0) and image(1.0) != image(2.0)
    assert len({image(1.0), image(1.0), image(2.0)}) == 2
    grid = {"pixel_values": np.zeros((4, 3), np.float32)}
    assert make_image_input(grid, 2) != make_image_input(grid, 2, kind="video")


@given(st.lists(st.integers(0, 20), min_size=8, max_size=8), st.integers(0, 4))
def test_prefix_keys_tell_images_apart_and_nothing_else(tokens: list[int], start: int) -> None:
    row = np.array(tokens, np.int32)
    first, second = ((PlacedImage(start=start, length=4, image=image(value)),) for value in (1.0, 2.0))
    a, b, same = prefix_keys(row, first), prefix_keys(row, second), prefix_keys(row, first)
    assert (a == same).all()
    assert (a[:start] == b[:start]).all() and (a[start + 4 :] == b[start + 4 :]).all()
    assert (a[start : start + 4] != b[start : start + 4]).all()
    assert len(set(a[start : start + 4].tolist())) == 4 and (a[start : start + 4] < 0).all()


def test_tokens_beside_the_placeholders_of_an_image_are_in_its_keys() -> None:
    placed = (PlacedImage(start=0, length=3, image=image()),)
    assert (prefix_keys(np.array([9, 5, 9]), placed) == prefix_keys(np.array([9, 6, 9]), placed)).tolist() == [
        True,
        False,
        True,
    ]


def test_places_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="image 1 starts at token 2"):
        check_placement(
            [PlacedImage(start=0, length=3, image=image()), PlacedImage(start=2, length=2, image=image())], 9
        )
    with pytest.raises(ValueError, match="ends at token 5 of 4"):
        check_placement([PlacedImage(start=0, length=5, image=image())], 4)
    with pytest.raises(ValueError, match="2 features cannot take 1 tokens"):
        PlacedImage(start=0, length=1, image=image())
    with pytest.raises(ValueError, match="POLICY span has no images"):
        Span(
            author=Author.POLICY,
            tokens=np.zeros(3, np.int32),
            logprobs=np.zeros(3, np.float32),
            version=Version(),
            images=(PlacedImage(start=0, length=2, image=image()),),
        )


def test_placeholders_are_those_within_the_run() -> None:
    tokens = np.array([9, 1, 9, 5, 9, 9], np.int32)
    placed = PlacedImage(start=2, length=3, image=image())
    assert find_placeholders(tokens, placed, PLACEHOLDER).tolist() == [2, 4]
    with pytest.raises(ValueError, match="3 placeholder tokens from token 2 on for an image of 2 features"):
        find_placeholders(tokens, PlacedImage(start=2, length=4, image=image()), PLACEHOLDER)


def test_a_span_ends_before_or_after_an_image_never_within() -> None:
    span = Span(
        author=Author.PROMPT,
        tokens=np.arange(6, dtype=np.int32),
        images=(PlacedImage(start=1, length=3, image=image()),),
    )
    assert span.truncate(1).images == () and span.truncate(4).images == span.images
    with pytest.raises(ValueError, match="cannot end at token 2, within an image"):
        span.truncate(2)
    assert [p.start for p in join_images([(6, span.images), (6, span.images)])] == [1, 7]


def test_images_survive_serialization() -> None:
    span = Span(
        author=Author.PROMPT,
        tokens=np.arange(6, dtype=np.int32),
        images=(PlacedImage(start=1, length=3, image=image(3)),),
    )
    codec = Codec(CORE_TYPES)
    _, back = codec.unpack(codec.pack("span", span))
    assert back.images == span.images
    np.testing.assert_array_equal(back.images[0].image.arrays["pixel_values"], np.full((4, 3), 3, np.float32))
