"""Images of conversations: content parts in any form as references to the media store, and their encoding."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miles.core.errors import DataError
from miles.core.image_files import ImageFileError, decode_base64_image, encode_data_url, fetch_image
from miles.core.media import Images
from miles.core.media_store import MediaStore, find_references, is_reference
from miles.core.protocols import ImageTokenizer, Tokenizer
from miles.rollout.serving.errors import SessionError
from miles.rollout.serving.messages import Message, extract_media, get_parts

_IMAGE_TYPES = ("image", "image_url", "input_image")


def encode_chat(tokenizer: Tokenizer, text: str, messages: Sequence[Message]) -> tuple[list[int], Images]:
    """Encode the rendered text of messages, with the images of their parts in the place of its markers."""
    references = find_references(messages)
    if not references:
        return tokenizer.encode(text), ()
    if not isinstance(tokenizer, ImageTokenizer):
        raise DataError(TEXT_ONLY)
    return tokenizer.encode_with_images(text, references)


TEXT_ONLY = (
    "There is an image in a message, but the model reads text only: its checkpoint has no image processor, or it is "
    "run without its vision tower."
)


async def prepare_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are in the store and processed, off the event loop.

    Raises SessionError at an image that cannot be used, at one for a model that reads text only, and at other media.
    """
    if next(extract_media(messages), None) is None:
        return list(messages)
    if not isinstance(tokenizer, ImageTokenizer):
        raise SessionError(TEXT_ONLY)
    store = tokenizer.media
    stored = await asyncio.to_thread(lambda: list(store_images(messages, store)))
    try:
        await tokenizer.prepare(stored)
    except DataError as error:
        raise SessionError(str(error)) from error
    return stored


def store_images(messages: Sequence[Message], store: MediaStore) -> Iterator[Message]:
    """Messages with every image put into the store, as ``{"type": "image", "image": "sha256:..."}``. Blocks.

    An image is base64, a data URL, a reference, bytes, or a ``PIL.Image``; where the store allows it, an http URL.
    """
    count = 0
    for number, message in enumerate(messages):
        parts = get_parts(message)
        if not any(part.get("type") in _IMAGE_TYPES for part in parts):
            _check_media(parts, number)
            yield message
            continue
        content: list[Any] = []
        for at, part in enumerate(parts):
            if part.get("type") not in _IMAGE_TYPES:
                content.append(part)
                continue
            count += 1
            where = f"messages[{number}].content[{at}]"
            if count > store.limits.max_images:
                raise SessionError(f"{where}: the conversation has more than {store.limits.max_images} images.")
            try:
                content.append({"type": "image", "image": store_image(_find_value(part), store, where)})
            except ImageFileError as error:
                raise SessionError(f"{where}: the image {error}.") from error
        _check_media(content, number)
        yield {**message, "content": content}


def store_image(value: Any, store: MediaStore, where: str) -> str:
    """Put one image into the store; ImageFileError if it cannot be used."""
    if isinstance(value, str):
        if is_reference(value):
            try:
                store.get(value)
            except (DataError, ValueError) as error:
                raise ImageFileError(f"{value[:80]} is not in this run") from error
            return value
        if value[:8].lower().startswith(("http://", "https://")):
            if not store.allow_urls:
                raise ImageFileError("is a URL, and this server fetches none; send a data URL")
            return store.put(fetch_image(value, store.limits), origin=where)
        return store.put(decode_base64_image(value, store.limits), origin=where)
    if isinstance(value, bytes | bytearray | memoryview):
        return store.put(bytes(value), origin=where)
    if type(value).__module__.startswith("PIL.") and hasattr(value, "save"):
        out = io.BytesIO()
        value.convert("RGB").save(out, format="PNG")
        return store.put(out.getvalue(), origin=where)
    raise ImageFileError(f"is a {type(value).__name__}, and not base64, a data URL, bytes or a PIL.Image")


def inline_images(messages: Sequence[Message], store: MediaStore) -> list[dict[str, Any]]:
    """Messages with their images as data URLs in OpenAI's format, for agents and other models. Blocks."""

    def convert(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part.get("type") == "video":
            raise DataError("A prompt has a video, which cannot be sent on to an agent; give its frames as images.")
        if part.get("type") != "image" or not is_reference(part.get("image")):
            return part
        return {"type": "image_url", "image_url": {"url": encode_data_url(store.get(str(part["image"])))}}

    return [
        {**message, "content": [convert(part) for part in parts]} if (parts := get_parts(message)) else dict(message)
        for message in messages
    ]


def _find_value(part: Mapping[str, Any]) -> Any:
    """What an image part holds, in OpenAI's format or ours."""
    for key in ("image", "image_url", "url", "base64", "bytes"):
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value.get("url") if value.get("bytes") is None else value["bytes"]
        if value is not None:
            return value
    raise ImageFileError("part has no image")


def _check_media(parts: Sequence[Mapping[str, Any]], number: int) -> None:
    for part in extract_media([{"content": list(parts)}]):
        is_stored_video = part.get("type") == "video" and is_reference(part.get("video"))
        if part.get("type") != "image" and not is_stored_video:
            raise SessionError(
                f"messages[{number}].content has a part of type {part.get('type')!r}; only text and images are read."
            )
