"""Images of prompt data: columns and content parts of a row, as parts that refer to files of the media store.

An image is a path (relative to the data file), bytes, base64, a data URL, an object of a Hugging Face image data set
(``{"bytes": ..., "path": ...}``), or an http URL where those are allowed. ``<image>`` in a text, and an image part
without an image, take the next image of the column that ``--multimodal-keys`` names.
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

MARKER = "<image>"
"""What stands for an image in a prompt that is a plain text."""
_SPLIT = re.compile(f"({re.escape(MARKER)})")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*", re.ASCII)
_MAX_PATH = 4096
_IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")


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


def attach_images(
    messages: Sequence[Mapping[str, Any]],
    images: Any,
    *,
    reader: MediaReader | None,
    folder: Path,
    where: str,
    column: str | None,
) -> tuple[dict[str, Any], ...]:
    """Messages whose images are parts that refer to the store; ``images`` is the value of ``column``.

    There must be as many ``<image>`` and empty image parts as images in the column.
    """
    given = [] if images is None else list(images) if isinstance(images, list | tuple) else [images]
    if reader is None:
        _check_text_only(messages, given, where, column)
        return tuple(dict(message) for message in messages)
    parts = [
        reader.read(value, folder, f"{where}, column {column}, image {number}") for number, value in enumerate(given, 1)
    ]
    rest = iter(parts)
    attached = tuple(
        _attach(message, rest, reader, folder, f"{where}, message {number}", split=column is not None)
        for number, message in enumerate(messages, 1)
    )
    taken = sum(any(part is each for message in attached for each in _parts(message)) for part in parts)
    if taken < len(parts):
        raise DataError(
            f"{where}: column {column} has {len(parts)} images for {taken} {MARKER} markers or image parts; write one "
            "for each image."
        )
    return attached


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _attach(
    message: Mapping[str, Any],
    rest: Iterator[dict[str, Any]],
    reader: MediaReader,
    folder: Path,
    where: str,
    split: bool,
) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        if not split or MARKER not in content:
            return dict(message)
        pieces = [piece for piece in _SPLIT.split(content) if piece]
        return {
            **message,
            "content": [_take(rest, where) if piece == MARKER else {"type": "text", "text": piece} for piece in pieces],
        }
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": [_attach_part(part, rest, reader, folder, where) for part in content]}


def _attach_part(part: Any, rest: Iterator[dict[str, Any]], reader: MediaReader, folder: Path, where: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in ("image", "image_url", "input_image"):
        value = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
        return _take(rest, where) if value is None else reader.read(value, folder, where)
    if part.get("type") in ("video", "video_url", "audio", "input_audio"):
        raise DataError(f"{where}: a part of type {part['type']!r} cannot be used; only text and images are read.")
    # Parquet gives every part all the fields any part has
    return {name: value for name, value in part.items() if value is not None}


def _take(rest: Iterator[dict[str, Any]], where: str) -> dict[str, Any]:
    part = next(rest, None)
    if part is None:
        raise DataError(
            f"{where}: there are more {MARKER} markers or image parts than images; name the column of the images with "
            '--multimodal-keys \'{"image": "COLUMN"}\'.'
        )
    return part


def _check_text_only(messages: Sequence[Mapping[str, Any]], given: list[Any], where: str, column: str | None) -> None:
    has_media = any(
        isinstance(part, Mapping) and part.get("type") not in ("text", None)
        for message in messages
        for part in _parts(message)
    )
    if given or has_media:
        place = f"column {column} has" if given else "a message has"
        raise DataError(f"{where}: {place} images, but the checkpoint has no image processor: it reads text only.")
