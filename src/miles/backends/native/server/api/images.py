"""Images of a request to the engine's server: SGLang's ``image_data`` and our ``image_runs``, parsed and placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.backends.native.server.api.request_types import ImageRun, ParsedRequest, VideoData
from miles.core.errors import DataError
from miles.core.image_files import ImageFileError
from miles.core.media import Images, PlacedImage, check_placement, find_placeholders
from miles.core.media_store import MediaStore
from miles.models.processor import MultimodalProcessor
from miles.models.tokenizer import HfTokenizer
from miles.rollout.images import store_image
from miles.rollout.serving.errors import RequestError


def split_image_data(value: Any, count: int, single: bool) -> list[tuple[Any, ...]]:
    """The images of each prompt: of one prompt an image or a list, of a batch one of these, or null, for each."""
    if value is None or value == []:
        return [()] * count
    rows = [value] if single else value
    if not isinstance(rows, list) or len(rows) != count:
        raise RequestError(
            f"image_data must be a list with the images of each of the {count} prompts.", param="image_data"
        )
    return [_split_row(row, "image_data" if single else f"image_data[{i}]") for i, row in enumerate(rows)]


def _split_row(row: Any, path: str) -> tuple[Any, ...]:
    items = [] if row is None else row if isinstance(row, list) else [row]
    values: list[Any] = []
    for at, item in enumerate(items):
        is_object = isinstance(item, dict)
        url = _parse_video(item) if is_object and "frames" in item else item.get("url") if is_object else item
        if not isinstance(url, str | VideoData):
            problem = f"{path}[{at}] must be base64, a data URL, or an object of a video with frames and fps."
            raise RequestError(problem, param="image_data", malformed=True)
        values.append(url)
    return tuple(values)


def _parse_video(item: dict[str, Any]) -> VideoData | None:
    frames, fps = item["frames"], item.get("fps")
    if set(item) - {"frames", "fps"} or not isinstance(frames, list) or type(fps) not in (int, float, type(None)):
        return None
    return VideoData(tuple(frames), fps) if all(isinstance(frame, str) for frame in frames) else None


def split_image_runs(value: Any, images: Sequence[tuple[Any, ...]], single: bool) -> list[tuple[ImageRun, ...] | None]:
    """The runs ``[start, length, digest]`` of each prompt's images."""
    if value is None:
        return [None] * len(images)
    rows = [value] if single else value
    if not isinstance(rows, list) or len(rows) != len(images):
        raise RequestError("image_runs must have a list of runs for each prompt.", param="image_runs", malformed=True)
    return [_parse_runs(row, len(images[i])) for i, row in enumerate(rows)]


def _parse_runs(row: Any, count: int) -> tuple[ImageRun, ...]:
    runs: list[ImageRun] = []
    for item in row if isinstance(row, list) else [None]:
        if not isinstance(item, list) or [type(each) for each in item] != [int, int, str]:
            raise RequestError(
                "image_runs must be a list of [start, length, digest].", param="image_runs", malformed=True
            )
        runs.append(ImageRun(*item))
    if len(runs) != count:
        raise RequestError(f"image_runs has {len(runs)} runs for {count} images of image_data.", param="image_runs")
    return tuple(runs)


def place_images(
    request: ParsedRequest, tokens: Sequence[int], tokenizer: HfTokenizer | None
) -> tuple[list[int], Images]:
    """The prompt's tokens and its images among them. Blocks; RequestError at an image that cannot be used."""
    if not isinstance(tokenizer, MultimodalProcessor):
        raise RequestError("image_data has images, but this model reads text only.", param="image_data")
    store = tokenizer.media
    if len(request.image_data) > store.limits.max_images:
        raise RequestError(
            f"image_data has {len(request.image_data)} images, and the limit is {store.limits.max_images}.",
            param="image_data",
        )
    references: list[str] = []
    for number, value in enumerate(request.image_data):
        try:
            references.append(_store(value, store, f"image_data[{number}]"))
        except ImageFileError as error:
            kind = "video" if isinstance(value, VideoData) else "image"
            raise RequestError(f"image_data[{number}]: the {kind} {error}.", param="image_data") from error
    try:
        if request.image_runs is None:
            return tokenizer.expand_tokens(tokens, references)
        return list(tokens), _place_runs(request.image_runs, tokens, references, tokenizer)
    except (DataError, ValueError) as error:
        raise RequestError(f"{str(error)[:1].upper()}{str(error)[1:].rstrip('.')}.", param="image_data") from error


def _store(value: Any, store: MediaStore, where: str) -> str:
    if not isinstance(value, VideoData):
        return store_image(value, store, where)
    frames = [store_image(frame, store, f"{where}.frames[{at}]") for at, frame in enumerate(value.frames)]
    return store.put_video(frames, value.fps, origin=where)


def _place_runs(
    runs: Sequence[ImageRun], tokens: Sequence[int], references: Sequence[str], tokenizer: MultimodalProcessor
) -> Images:
    """The images where the client has placed them; its processor must have given the same arrays."""
    placed: list[PlacedImage] = []
    for number, (run, reference) in enumerate(zip(runs, references, strict=True)):
        image = tokenizer.process(reference).image
        if image.digest != run.digest:
            raise DataError(
                f"image {number} has other pixels here than where it was processed; use the same versions of "
                "transformers and Pillow, and the same checkpoint"
            )
        placed.append(PlacedImage(start=run.start, length=run.length, image=image))
    check_placement(placed, len(tokens))
    array = np.asarray(tokens, np.int64)
    for each in placed:
        find_placeholders(array, each, tokenizer.get_placeholder(each.image.kind))
    return tuple(placed)
