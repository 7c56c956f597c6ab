"""Videos as lists of frames: a JSON manifest that refers to image files, and the frames of animated images.

There is no decoder of video files here; animated GIF, WebP and PNG files are read with Pillow.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import Any

from miles.core.image_files import ImageFileError, ImageLimits, open_image, read_image_info

SUFFIX = "video.json"
"""File name extension of a manifest."""
DEFAULT_FPS = 2.0
"""Frames per second of frames that come without: the rate at which Qwen's processors sample a video."""
MAX_FRAMES = 768
_MAGIC = b'{"miles_video": 1, '


@dataclass(frozen=True, slots=True)
class VideoManifest:
    """The frames of a video, as references to image files of a media store, and how many there are in a second."""

    frames: tuple[str, ...]
    fps: float = DEFAULT_FPS

    def __post_init__(self) -> None:
        if not 2 <= len(self.frames) <= MAX_FRAMES:
            raise ImageFileError(
                f"has {len(self.frames)} frames, but a video must have from 2 to {MAX_FRAMES}; give one frame as "
                "an image"
            )
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ImageFileError(f"has {self.fps} frames per second, which must be a positive number")

    def encode(self) -> bytes:
        """The manifest file; equal videos have equal bytes."""
        return _MAGIC + json.dumps({"fps": float(self.fps), "frames": list(self.frames)}).encode()[1:]


def parse_manifest(data: bytes) -> VideoManifest | None:
    """The manifest in a file that ``VideoManifest.encode`` made; None of any other file.

    >>> parse_manifest(VideoManifest(("a", "b"), 4.0).encode())
    VideoManifest(frames=('a', 'b'), fps=4.0)
    """
    if not data.startswith(_MAGIC):
        return None
    read = json.loads(data)
    return VideoManifest(tuple(read["frames"]), float(read["fps"]))


def split_animation(data: bytes, limits: ImageLimits) -> tuple[list[bytes], float]:
    """The frames of an animated image as PNG files, and the frames per second.

    ImageFileError if the file is no animated image; a frame is shown for the mean duration of all.
    """
    info = read_image_info(data, limits)
    frames: list[bytes] = []
    milliseconds = 0.0
    with open_image(data) as image:
        count = int(getattr(image, "n_frames", 1))
        if count > MAX_FRAMES or count * info.width * info.height > limits.max_pixels:
            raise ImageFileError(
                f"has {count} frames of {info.width} x {info.height} pixels, and the limit is {MAX_FRAMES} frames and "
                f"{limits.max_pixels} pixels in all"
            )
        for number in range(count):
            image.seek(number)
            frames.append(_encode_png(image))
            milliseconds += float(image.info.get("duration") or 0.0)
    return frames, 1000.0 * count / milliseconds if milliseconds else DEFAULT_FPS


def _encode_png(image: Any) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, format="PNG")
    return out.getvalue()


def describe_video_value(value: Any) -> str:
    """What an unusable value is, as the end of a sentence about a video."""
    name = f"{value[:120]!r}" if isinstance(value, str) else f"a {type(value).__name__}"
    return (
        f"is {name}, and not a list of frames, an object with frames and fps, or an animated GIF, WebP or PNG file; "
        "video files are not decoded here, so extract their frames first (ffmpeg -i clip.mp4 -vf fps=2 %03d.png)"
    )
