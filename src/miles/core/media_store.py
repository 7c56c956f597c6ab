"""Content-addressed media store: raw image files by SHA-256, in memory, at their own path, or in a run's ``media/``.

A video is a manifest, a file of its own, that refers to the image files of its frames.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.core.image_files import ImageLimits, read_image_info
from miles.core.video_files import SUFFIX, VideoManifest, parse_manifest

PREFIX = "sha256:"
"""What a reference in a message starts with: ``{"type": "image", "image": "sha256:<hex>"}``."""


class MediaStore:
    """Raw files by content hash. Thread-safe.

    A file that is read from disk is remembered by its path. Other files are in memory up to ``budget_bytes``, and
    beyond it in ``folder`` (without one, in a temporary folder). ``keep`` writes a file to ``folder``, where each file
    is once. ``allow_urls``: images may be named by http URLs, which whoever reads them fetches.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        budget_bytes: int = 1 << 30,
        limits: ImageLimits | None = None,
        allow_urls: bool = False,
    ) -> None:
        self.folder = folder
        self.allow_urls = allow_urls
        self.limits = limits or ImageLimits()
        self._budget_bytes = budget_bytes
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._paths: dict[str, Path] = {}
        self._kept: dict[str, Path] = {}
        self._origins: dict[str, str] = {}
        self._folders: list[Path] = []
        self._spill: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()

    def add_folder(self, folder: Path) -> None:
        """Also find files in the ``media/`` of another run."""
        self._folders.append(folder)

    def put(self, data: bytes, *, path: Path | None = None, origin: str = "") -> str:
        """Add a file, and return the reference to it.

        ``path`` is where it was read from and can be read again; ``origin`` names it in errors. Raises ImageFileError
        if the header is not that of an image within the limits.
        """
        read_image_info(data, self.limits)
        return self._add(data, path, origin)

    def put_video(self, frames: Sequence[str], fps: float | None = None, *, origin: str = "") -> str:
        """Add the manifest of a video whose frames are in the store, and return the reference to it.

        Raises ImageFileError if there are too few or too many frames.
        """
        manifest = VideoManifest(tuple(frames)) if fps is None else VideoManifest(tuple(frames), fps)
        return self._add(manifest.encode(), None, origin)

    def _add(self, data: bytes, path: Path | None, origin: str) -> str:
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            self._origins.setdefault(digest, origin)
            if digest in self._memory or digest in self._paths or digest in self._kept:
                return PREFIX + digest
            if path is not None:
                self._paths[digest] = path
                return PREFIX + digest
            self._memory[digest] = data
            self._memory_bytes += len(data)
            while self._memory_bytes > self._budget_bytes:
                oldest, evicted = self._memory.popitem(last=False)
                self._memory_bytes -= len(evicted)
                self._paths[oldest] = self._write(self._get_spill_folder(), oldest, evicted)
        return PREFIX + digest

    def get(self, reference: str) -> bytes:
        """The file; DataError if it is unknown, gone or changed."""
        digest = parse_reference(reference)
        with self._lock:
            data = self._memory.get(digest)
            if data is not None:
                self._memory.move_to_end(digest)
                return data
            path = self._kept.get(digest) or self._paths.get(digest) or self._find_kept(digest)
            path = path or next((found for folder in self._folders if (found := _find_file(folder, digest))), None)
        if path is None:
            raise DataError(f"There is no image {PREFIX}{digest[:12]}… here; it was never added to this run.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"The image {path} cannot be read any more ({error.strerror}).") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise DataError(f"The image {path} has changed since it was first read; restore it.")
        return data

    def describe(self, reference: str) -> str:
        """Where a file came from, as errors name it."""
        digest = parse_reference(reference)
        return self._origins.get(digest) or f"image {digest[:12]}"

    def is_kept(self, reference: str) -> bool:
        """Whether ``keep`` has nothing to do."""
        return self.folder is None or parse_reference(reference) in self._kept

    def keep(self, reference: str) -> Path | None:
        """Write a file to the folder, once, and return its path there; None without a folder.

        Of a video, the files of its frames are written before its manifest.
        """
        digest = parse_reference(reference)
        if self.folder is None:
            return None
        with self._lock:
            path = self._kept.get(digest) or self._find_kept(digest)
        if path is not None:
            return path
        data = self.get(reference)
        manifest = parse_manifest(data)
        for frame in () if manifest is None else manifest.frames:
            self.keep(frame)
        path = self._write(self.folder, digest, data)
        with self._lock:
            self._kept[digest] = path
            if (held := self._memory.pop(digest, None)) is not None:
                self._memory_bytes -= len(held)
        return path

    def _find_kept(self, digest: str) -> Path | None:
        """The path in the folder, where an earlier process of the run wrote it."""
        path = None if self.folder is None else _find_file(self.folder, digest)
        if path is not None:
            self._kept[digest] = path
        return path

    def _get_spill_folder(self) -> Path:
        if self._spill is None:
            self._spill = tempfile.TemporaryDirectory(prefix="miles-media-")
        return Path(self._spill.name)

    @staticmethod
    def _write(folder: Path, digest: str, data: bytes) -> Path:
        """Write a file complete or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        is_video = parse_manifest(data) is not None
        suffix = SUFFIX if is_video else read_image_info(data, ImageLimits(max_bytes=len(data))).suffix
        path = folder / f"{digest}.{suffix}"
        if not path.exists():
            partial = folder / f".{digest}.{os.getpid()}.{threading.get_ident()}.tmp"
            partial.write_bytes(data)
            partial.replace(path)
        return path


def _find_file(folder: Path, digest: str) -> Path | None:
    return next(iter(folder.glob(f"{digest}.*")), None) if folder.is_dir() else None


def parse_reference(reference: str) -> str:
    """The hash in ``sha256:<hex>``; ValueError if it is no such reference.

    >>> parse_reference("sha256:" + 64 * "0") == 64 * "0"
    True
    """
    digest = reference.removeprefix(PREFIX)
    if not reference.startswith(PREFIX) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{reference[:80]!r} is no reference of the form sha256:<64 hexadecimal digits>")
    return digest


def is_reference(value: object) -> bool:
    """Whether a value is a reference to a stored file."""
    return isinstance(value, str) and value.startswith(PREFIX)


def find_references(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The images and videos of messages in order, as references to the store; DataError at media of another kind."""
    references: list[str] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type")
            if kind in ("image", "video") and is_reference(part.get(kind)):
                references.append(str(part[kind]))
            elif kind in ("image", "video", "video_url", "audio", "input_audio", "image_url"):
                raise DataError(f"A message has a part of type {kind!r}; only text, images and videos are read here.")
    return references


def find_image_references(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The images of messages, without its videos."""
    images = [
        {"content": [part for part in message["content"] if part.get("type") != "video"]}
        for message in messages
        if isinstance(message.get("content"), list | tuple)
    ]
    return find_references(images)
