"""Options of images: limits, remote fetching, and the memory of raw and processed images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles.config.option import option
from miles.core.image_files import ImageLimits
from miles.core.media_store import MediaStore


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
