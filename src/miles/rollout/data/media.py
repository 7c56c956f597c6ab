"""Images and videos of prompt data: columns and content parts of a row, as parts that refer to the media store.

An image is a path (relative to the data file), bytes, base64, a data URL, an object of a Hugging Face image data set
(``{"bytes": ..., "path": ...}``), or an http URL where those are allowed. ``<image>`` in a text, and an image part
without an image, take the next image of the column that ``--multimodal-keys`` names; ``<video>`` the next video.

A video is a list of frames, each an image, an object ``{"frames": [...], "fps": ...}``, or an animated image file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from miles.core.errors import DataError
from miles.core.image_files import ImageFileError, decode_base64_image, fetch_image
from miles.core.media_store import MediaStore, is_reference
from miles.core.video_files import describe_video_value, split_animation

MARKERS: Mapping[str, str] = {"<image>": "image", "<video>": "video"}
"""What stands for an image or a video in a prompt that is a plain text."""
_TEXT_MARKERS: Mapping[str, str] = {kind: marker for marker, kind in MARKERS.items()}
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*", re.ASCII)
_MAX_PATH = 4096
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
_VIDEO_KEYS = ("frames", "video", "video_url", "url", "path", "bytes")
_PART_KINDS: Mapping[Any, str] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReader:
    """Reads images into ``store``; http URLs are fetched only where it allows them."""

    store: MediaStore

    def read(self, value: Any, folder: Path, where: str) -> dict[str, Any]:
        """An image in any form as a content part; DataError if it cannot be used."""
        try:
            return {"type": "image", "image": self._read(value, folder, where)}
        except ImageFileError as error:
            raise DataError(f"{where}: the image {error}.") from error

    def read_video(self, value: Any, folder: Path, where: str, fps: float | None = None) -> dict[str, Any]:
        """A video in any form as a content part; DataError if it cannot be used."""
        try:
            return {"type": "video", "video": self._read_video(value, folder, where, fps)}
        except ImageFileError as error:
            raise DataError(f"{where}: the video {error}.") from error

    def _read_video(self, value: Any, folder: Path, where: str, fps: float | None) -> str:
        if isinstance(value, Mapping):
            fps = value.get("fps") if fps is None else fps
            value = next((value[key] for key in _VIDEO_KEYS if value.get(key) is not None), None)
            return self._read_video(value, folder, where, fps)
        if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float)):
            raise ImageFileError(f"has fps {fps!r}, which must be a number")
        if is_reference(value):
            self.store.get(value)
            return value
        if isinstance(value, list | tuple):
            frames = [self.read(frame, folder, f"{where}, frame {at}")["image"] for at, frame in enumerate(value, 1)]
            return self.store.put_video(frames, fps, origin=where)
        try:
            data = self.store.get(self._read(value, folder, where))
        except ImageFileError as error:
            raise ImageFileError(describe_video_value(value)) from error
        pictures, own_fps = split_animation(data, self.store.limits)
        frames = [self.store.put(picture, origin=f"{where}, frame {at}") for at, picture in enumerate(pictures, 1)]
        return self.store.put_video(frames, own_fps if fps is None else fps, origin=where)

    def _read(self, value: Any, folder: Path, where: str) -> str:
        if isinstance(value, Mapping):
            value = _unwrap(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return self.store.put(bytes(value), origin=where)
        if not isinstance(value, str) or not value:
            raise ImageFileError(f"is a {type(value).__name__}, and not a path, bytes, base64 or a URL")
        if is_reference(value):
            self.store.get(value)
            return value
        scheme = value[:8].lower()
        if scheme.startswith("data:"):
            return self.store.put(decode_base64_image(value, self.store.limits), origin=where)
        if scheme.startswith(("http://", "https://")):
            if not self.store.allow_urls:
                raise ImageFileError("is a URL, and none are fetched unless --allow-image-urls is given")
            return self.store.put(fetch_image(value, self.store.limits), origin=where)
        return self._read_path_or_base64(value, folder, where)

    def _read_path_or_base64(self, value: str, folder: Path, where: str) -> str:
        if value.lower().startswith("file://"):
            value = unquote(urlsplit(value).path)
        is_path = len(value) < _MAX_PATH and "\0" not in value and "\n" not in value
        if is_path and (folder / value).is_file():
            return self._read_file(folder / value, where)
        if _BASE64.fullmatch(value):
            return self.store.put(decode_base64_image(value, self.store.limits), origin=where)
        raise ImageFileError(f"{value[:120]!r} is no file, relative to {folder}")

    def _read_file(self, path: Path, where: str) -> str:
        limit = self.store.limits.max_bytes
        try:
            size = path.stat().st_size
            if size > limit:
                raise ImageFileError(f"{path} has {size} bytes, and the limit is {limit}")
            data = path.read_bytes()
        except OSError as error:
            raise ImageFileError(f"{path} cannot be read ({error.strerror})") from error
        return self.store.put(data, path=path.absolute(), origin=f"{where} ({path.name})")


def _unwrap(value: Mapping[str, Any]) -> Any:
    """The image in an object: of an image data set, or an OpenAI ``image_url``."""
    for key in ("bytes", "base64", "url", "image", "path"):
        if value.get(key) is not None:
            return value[key]
    raise ImageFileError("is an object without bytes, path or url")


MediaColumns = Mapping[str, tuple[str, Any]]
"""Of each kind of media, the name of its column and the value there."""


def attach_media(
    messages: Sequence[Mapping[str, Any]],
    columns: MediaColumns,
    *,
    reader: MediaReader | None,
    folder: Path,
    where: str,
) -> tuple[dict[str, Any], ...]:
    """Messages whose images and videos are parts that refer to the store.

    There must be as many ``<image>`` and empty image parts as images in the column, and likewise of videos.
    """
    given = {kind: _list_media(kind, value) for kind, (_, value) in columns.items()}
    if reader is None:
        _check_text_only(messages, [(columns[kind][0], kind) for kind, values in given.items() if values], where)
        return tuple(dict(message) for message in messages)
    parts: dict[str, list[dict[str, Any]]] = {}
    for kind, values in given.items():
        read = reader.read if kind == "image" else reader.read_video
        place = f"{where}, column {columns[kind][0]}, {kind}"
        parts[kind] = [read(value, folder, f"{place} {number}") for number, value in enumerate(values, 1)]
    attacher = _Attacher(reader, folder, {kind: iter(each) for kind, each in parts.items()})
    attached = tuple(
        attacher.attach(message, f"{where}, message {number}") for number, message in enumerate(messages, 1)
    )
    for kind, each in parts.items():
        taken = sum(any(part is own for message in attached for own in _parts(message)) for part in each)
        if taken < len(each):
            raise DataError(
                f"{where}: column {columns[kind][0]} has {len(each)} {kind}s for {taken} {_TEXT_MARKERS[kind]} markers "
                f"or {kind} parts; write one for each {kind}."
            )
    return attached


def _list_media(kind: str, value: Any) -> list[Any]:
    """The images or videos of a column. A list of images is one video; lists and objects of frames are several."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return []
    if not isinstance(value, list | tuple):
        return [value]
    if kind == "image":
        return list(value)
    several = all(isinstance(each, list | tuple) or (isinstance(each, Mapping) and "frames" in each) for each in value)
    return list(value) if several else [value]


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


class _Attacher:
    """Puts the images and videos of a row into its messages, in order."""

    def __init__(self, reader: MediaReader, folder: Path, rest: Mapping[str, Iterator[dict[str, Any]]]) -> None:
        self._reader = reader
        self._folder = folder
        self._rest = rest
        markers = [re.escape(marker) for marker, kind in MARKERS.items() if kind in rest]
        self._split = re.compile(f"({'|'.join(markers)})") if markers else None

    def attach(self, message: Mapping[str, Any], where: str) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            pieces = [piece for piece in self._split.split(content) if piece] if self._split is not None else []
            if not any(piece in MARKERS for piece in pieces):
                return dict(message)
            return {**message, "content": [self._fill(piece, where) for piece in pieces]}
        if not isinstance(content, list | tuple):
            return dict(message)
        return {**message, "content": [self._attach_part(part, where) for part in content]}

    def _fill(self, piece: str, where: str) -> dict[str, Any]:
        kind = MARKERS.get(piece)
        return {"type": "text", "text": piece} if kind is None else self._take(kind, where)

    def _attach_part(self, part: Any, where: str) -> Any:
        if not isinstance(part, Mapping):
            return part
        kind = _PART_KINDS.get(part.get("type"))
        if kind == "image":
            value = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
            return self._take(kind, where) if value is None else self._reader.read(value, self._folder, where)
        if kind == "video":
            value = next((part[key] for key in _VIDEO_KEYS if part.get(key) is not None), None)
            if value is None:
                return self._take(kind, where)
            return self._reader.read_video(value, self._folder, where, part.get("fps"))
        if part.get("type") in ("audio", "input_audio"):
            raise DataError(
                f"{where}: a part of type {part['type']!r} cannot be used; only text, images and videos are read."
            )
        # Parquet gives every part all the fields any part has
        return {name: value for name, value in part.items() if value is not None}

    def _take(self, kind: str, where: str) -> dict[str, Any]:
        part = next(self._rest.get(kind, iter(())), None)
        if part is None:
            raise DataError(
                f"{where}: there are more {_TEXT_MARKERS[kind]} markers or {kind} parts than {kind}s; name the column "
                f'of the {kind}s with --multimodal-keys \'{{"{kind}": "COLUMN"}}\'.'
            )
        return part


def _check_text_only(messages: Sequence[Mapping[str, Any]], given: Sequence[tuple[str, str]], where: str) -> None:
    has_media = any(
        isinstance(part, Mapping) and part.get("type") not in ("text", None)
        for message in messages
        for part in _parts(message)
    )
    if given or has_media:
        place = f"column {given[0][0]} has {given[0][1]}s" if given else "a message has images"
        raise DataError(
            f"{where}: {place}, but the model reads text only: its checkpoint has no image processor, or it is run "
            "without its vision tower."
        )
