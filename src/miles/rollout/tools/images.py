"""Image tools ``crop`` and ``zoom``: a part of one of the conversation's images, at full resolution.

Places are fractions of the width and height, so that they do not depend on how the processor resizes an image. Images
are numbered from 1: those of the prompt, then those the tools have returned.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

from miles.core.errors import DataError
from miles.core.image_files import ImageFileError, decode_image
from miles.core.media_store import MediaStore, find_image_references
from miles.core.types import Prompt
from miles.rollout.tools.tool import Tool, ToolError

_MIN_PIXELS = 4
_MAX_ZOOM = 32.0
_FRACTION = {"type": "number", "minimum": 0, "maximum": 1}
_IMAGE = {"type": "integer", "description": "Which image, counted from 1; the first by default."}


class ImageTools:
    """The image tools of one trajectory."""

    def __init__(self, prompt: Prompt, media: MediaStore) -> None:
        self._media = media
        self._images = find_image_references(prompt.messages)

    def build_crop(self) -> Tool:
        """Build the tool ``crop``."""
        edges = ("left", "top", "right", "bottom")

        async def call(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
            left, top, right, bottom = (float(arguments[name]) for name in edges)
            return await self._cut(int(arguments.get("image", 1)), (left, top, right, bottom), enlarge=False)

        return Tool(
            name="crop",
            description="Show a part of an image; edges are fractions of its width and height, from 0 to 1.",
            parameters={
                "type": "object",
                "properties": {"image": _IMAGE, **dict.fromkeys(edges, _FRACTION)},
                "required": list(edges),
            },
            call=call,
        )

    def build_zoom(self) -> Tool:
        """Build the tool ``zoom``."""

        async def call(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
            factor = float(arguments.get("factor", 2.0))
            if not 1 <= factor <= _MAX_ZOOM:
                raise ToolError(f"factor must be from 1 to {_MAX_ZOOM:g}")
            half = 0.5 / factor
            x, y = (min(max(float(arguments[name]), half), 1 - half) for name in ("x", "y"))
            box = (x - half, y - half, x + half, y + half)
            return await self._cut(int(arguments.get("image", 1)), box, enlarge=True)

        return Tool(
            name="zoom",
            description="Enlarge a part of an image around the point x, y, given as fractions from 0 to 1.",
            parameters={
                "type": "object",
                "properties": {
                    "image": _IMAGE,
                    "x": _FRACTION,
                    "y": _FRACTION,
                    "factor": {"type": "number", "description": "How many times larger; 2 by default."},
                },
                "required": ["x", "y"],
            },
            call=call,
        )

    async def _cut(self, number: int, box: tuple[float, float, float, float], *, enlarge: bool) -> list[dict[str, Any]]:
        if not 1 <= number <= len(self._images):
            raise ToolError(f"there is no image {number}, only {len(self._images) or 'none'}")
        reference = await asyncio.to_thread(self._cut_image, self._images[number - 1], box, enlarge)
        self._images.append(reference)
        return [
            {"type": "text", "text": f"Image {len(self._images)}:"},
            {"type": "image", "image": reference},
        ]

    def _cut_image(self, reference: str, box: tuple[float, float, float, float], enlarge: bool) -> str:
        try:
            image = decode_image(self._media.get(reference), self._media.limits)
        except (ImageFileError, DataError) as error:
            raise ToolError(f"the image cannot be read ({error})") from error
        sizes = (image.width, image.height, image.width, image.height)
        left, top, right, bottom = (round(edge * size) for edge, size in zip(box, sizes, strict=True))
        if not (left >= 0 and top >= 0 and right <= image.width and bottom <= image.height):
            raise ToolError("the edges must be from 0 to 1")
        if right - left < _MIN_PIXELS or bottom - top < _MIN_PIXELS:
            raise ToolError(f"that part is smaller than {_MIN_PIXELS} pixels")
        part = image.crop((left, top, right, bottom))
        if enlarge:
            part = part.resize((image.width, image.height))
        out = io.BytesIO()
        part.save(out, format="PNG")
        return self._media.put(out.getvalue())
