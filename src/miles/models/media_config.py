"""Options of images: limits, remote fetching, memory; and the image processor settings of a checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.option import option
from miles.core.errors import UsageError, describe_error
from miles.core.image_files import ImageLimits
from miles.core.media_store import MediaStore

_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Which images are accepted, and how much memory they may take."""

    allow_image_urls: bool = option(
        False, "Fetch images that data or requests name by http URL; otherwise such an image is refused."
    )
    image_max_mib: int = option(20, "Largest image file.", unit="MiB", ge=1)
    image_max_pixels: int = option(
        50_000_000, "Most pixels of an image before it is resized, checked before it is decoded.", unit="pixels", ge=1
    )
    max_images_per_request: int = option(64, "Most images of a conversation or request.", unit="images", ge=1)
    image_cache_mib: int = option(
        1024, "Memory of raw images, and as much again of processed ones, each kept once.", unit="MiB", ge=1
    )

    def build_store(self, folder: Path | None = None) -> MediaStore:
        """The store of raw images; those that are used are kept in ``folder``."""
        limits = ImageLimits(
            max_bytes=self.image_max_mib << 20,
            max_pixels=self.image_max_pixels,
            max_images=self.max_images_per_request,
        )
        return MediaStore(
            folder, budget_bytes=self.image_cache_mib << 20, limits=limits, allow_urls=self.allow_image_urls
        )


def has_image_processor(folder: str | Path) -> bool:
    """Whether a checkpoint folder has an image processor."""
    return bool(read_processor_settings(Path(folder)).get("image_processor_type"))


def read_processor_settings(folder: Path) -> dict[str, Any]:
    """The settings of the image processor and the name of the processor's class, wherever a checkpoint has them."""
    merged: dict[str, Any] = {}
    for name in reversed(_FILES):
        path = folder / name
        if not path.is_file():
            continue
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not JSON ({describe_error(error)}); copy it there again.") from error
        merged |= read | (read.get("image_processor") or {})
    return merged
