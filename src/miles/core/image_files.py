"""Image files: formats, byte and pixel limits, and decoding with Pillow, which is imported when first needed."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from miles.core.errors import UsageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read, as Pillow names them; of an animation the first frame."""
_SUFFIXES = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
_DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<params>(?:;[^;,]*)*),", re.ASCII)


class ImageFileError(ValueError):
    """An image cannot be used; the message says why, as the end of a sentence about it: ``is truncated``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of one image, and of the images of one request. ``max_pixels`` is checked before pixels are decoded."""

    max_bytes: int = 20 << 20
    max_pixels: int = 50_000_000
    max_images: int = 64


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Format and size of an image, from its header."""

    format: str
    width: int
    height: int

    @property
    def suffix(self) -> str:
        """File name extension."""
        return _SUFFIXES[self.format]


def read_image_info(data: bytes, limits: ImageLimits | None = None) -> ImageInfo:
    """Format and size of an image file, without decoding its pixels; ImageFileError if it is none or too large."""
    limits = limits or ImageLimits()
    if len(data) > limits.max_bytes:
        raise ImageFileError(f"has {len(data)} bytes, and the limit is {limits.max_bytes}")
    with open_image(data) as image:
        info = ImageInfo(str(image.format), int(image.width), int(image.height))
    if info.width * info.height > limits.max_pixels:
        raise ImageFileError(
            f"has {info.width} x {info.height} pixels, and the limit is {limits.max_pixels} pixels in all"
        )
    if not info.width or not info.height:
        raise ImageFileError("has no pixels")
    return info


def decode_image(data: bytes, limits: ImageLimits | None = None) -> Any:
    """The ``PIL.Image`` of a file in RGB, turned as its EXIF orientation says; ImageFileError if it is damaged."""
    read_image_info(data, limits)
    from PIL import ImageOps

    with open_image(data) as image:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def open_image(data: bytes) -> Iterator[Any]:
    """Open a file with Pillow; whatever goes wrong in the block, too, is an ImageFileError."""
    image_module = _import_pillow()
    if not data:
        raise ImageFileError("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image_module.DecompressionBombWarning)  # limited by read_image_info
            with image_module.open(io.BytesIO(data), formats=FORMATS) as image:
                yield image
    except ImageFileError:
        raise
    except image_module.UnidentifiedImageError as error:
        raise ImageFileError(f"is no image of a known format ({', '.join(FORMATS)})") from error
    except image_module.DecompressionBombError as error:
        raise ImageFileError("has far too many pixels for its size (a decompression bomb)") from error
    except Exception as error:  # decoders raise whatever a damaged file makes them stumble over
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        truncated = "truncated" in reason.lower()
        raise ImageFileError("is truncated" if truncated else f"is damaged ({reason})") from error


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("Images need Pillow, which is not installed; run pip install pillow.") from error
    return Image


def decode_base64_image(text: str, limits: ImageLimits | None = None) -> bytes:
    """The file in a base64 text or a ``data:`` URL; its size is checked before it is decoded."""
    limits = limits or ImageLimits()
    match = _DATA_URL.match(text[:256])
    if match is not None:
        if match["type"] is not None and not match["type"].lower().startswith("image/"):
            raise ImageFileError(f"is a data URL of type {match['type']}, and not of an image")
        if ";base64" not in match["params"].lower():
            raise ImageFileError("is a data URL without base64")
        text = text[match.end() :]
    elif text.startswith("data:"):
        raise ImageFileError("is a data URL that is not well-formed")
    if len(text) * 3 // 4 > limits.max_bytes + 3:
        raise ImageFileError(f"has about {len(text) * 3 // 4} bytes, and the limit is {limits.max_bytes}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageFileError("is not valid base64") from error


def fetch_image(url: str, limits: ImageLimits | None = None, *, timeout: float = 20.0) -> bytes:
    """Download an image over http, no further than the byte limit; ImageFileError if that fails. Blocks."""
    from urllib.request import Request, urlopen  # an import of 40 ms that `--help` does not pay

    limits = limits or ImageLimits()
    if not url.lower().startswith(("http://", "https://")):
        raise ImageFileError("is a URL that is neither http nor https")
    try:
        with urlopen(Request(url, headers={"Accept": "image/*"}), timeout=timeout) as response:
            kind = str(response.headers.get_content_type())
            if not kind.startswith("image/") and kind != "application/octet-stream":
                raise ImageFileError(f"at {url[:200]} is of type {kind}, and not an image")
            data = response.read(limits.max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageFileError):
            raise
        raise ImageFileError(f"at {url[:200]} cannot be fetched ({error})") from error
    if len(data) > limits.max_bytes:
        raise ImageFileError(f"at {url[:200]} has more than {limits.max_bytes} bytes")
    return data


def encode_data_url(data: bytes) -> str:
    """A ``data:`` URL of an image file."""
    kind = {"jpg": "jpeg"}.get(suffix := read_image_info(data).suffix, suffix)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
