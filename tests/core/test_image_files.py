"""Image files from anywhere: what is read, what is refused and why, and that damage never becomes another error."""

import base64
import io
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from miles.core.image_files import (
    ImageFileError,
    ImageLimits,
    decode_base64_image,
    decode_image,
    encode_data_url,
    read_image_info,
)


def make(format: str = "PNG", mode: str = "RGB", size=(6, 4), **options) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, 7).save(out, format=format, **options)
    return out.getvalue()


def make_bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises that many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_that_are_read(format):
    data = make(format)
    assert (read_image_info(data).width, read_image_info(data).height) == (6, 4)
    assert decode_image(data).mode == "RGB"
    assert decode_base64_image(encode_data_url(data)) == data


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16", "LA"])
def test_every_mode_becomes_rgb(mode):
    assert decode_image(make("PNG", mode)).mode == "RGB"


def test_the_orientation_of_a_photograph_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(make("JPEG", exif=exif)).size == (4, 6)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"<svg></svg>", "is no image of a known format"),
        (make("TIFF"), "is no image of a known format"),
        (b"%PDF-1.4", "is no image of a known format"),
        (make_bomb(8000, 8000), "8000 x 8000 pixels, and the limit is 50000000"),
        (make_bomb(60000, 60000), "decompression bomb"),
        (make(size=(300, 300)), "bytes, and the limit is 100"),
    ],
)
def test_what_is_refused_before_any_pixel_is_decoded(data, reason):
    limits = ImageLimits(max_bytes=100) if "limit is 100" in reason else ImageLimits()
    with pytest.raises(ImageFileError, match=reason):
        read_image_info(data, limits)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data:text/html;base64,PGI+", "of type text/html, and not of an image"),
        ("data:image/png,abc", "without base64"),
        ("data:;;;", "not well-formed"),
        ("http://example.com/a.png", "not valid base64"),
        ("AAAA" * 1000, "about 3000 bytes, and the limit is 100"),
    ],
)
def test_texts_that_are_no_image(text, reason):
    with pytest.raises(ImageFileError, match=reason):
        decode_base64_image(text, ImageLimits(max_bytes=100))


def test_plain_base64_is_read_with_line_breaks():
    assert decode_base64_image(base64.encodebytes(make()).decode()) == make()


@pytest.mark.property
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.data())
def test_a_damaged_file_is_decoded_or_refused_and_nothing_else(format, data):
    raw = bytearray(make(format, size=(24, 16)))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        image = decode_image(bytes(raw[:cut]), ImageLimits(max_pixels=100_000))
    except ImageFileError as error:
        assert str(error).startswith(("is ", "has "))
    else:
        assert image.mode == "RGB"
