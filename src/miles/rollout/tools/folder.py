"""An attempt's own folder: made when it is opened, gone when it is closed, and no path leads out of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from miles.rollout.tools.tool import ToolError


class Folder:
    """Regular files under ``root``; ``most_bytes`` together and ``most_files``.

    Links are never followed and never listed: what else works in the folder (an MCP server) may have made some.
    """

    def __init__(self, root: Path, *, most_bytes: int = 64 << 20, most_files: int = 1000) -> None:
        self.root = root.resolve()
        self._most_bytes = most_bytes
        self._most_files = most_files

    def place(self, name: str) -> Path:
        """Where ``name`` is; ToolError when that is not inside the folder."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ToolError(f"{name!r} is not a path inside the workspace")
        place = self.root / path
        if place.resolve() != place:  # a link somewhere on the way
            raise ToolError(f"{name!r} is a link, and links are not followed")
        return place

    def names(self) -> list[str]:
        """Of every file, from the root, in order."""
        found: list[str] = []
        for here, folders, files in os.walk(self.root):
            folders.sort()
            at = Path(here)
            found += [str((at / name).relative_to(self.root)) for name in files if not (at / name).is_symlink()]
        return sorted(found)

    def read(self, name: str) -> bytes:
        place = self.place(name)
        if not place.is_file():
            raise ToolError(f"there is no file {name!r}")
        return place.read_bytes()

    def write(self, name: str, data: bytes) -> None:
        place = self.place(name)
        if place == self.root or place.is_dir():
            raise ToolError(f"{name!r} is a folder")
        names = self.names()
        others = sum((self.root / other).stat().st_size for other in names if other != str(PurePosixPath(name)))
        if others + len(data) > self._most_bytes:
            raise ToolError(f"the workspace may hold {self._most_bytes} bytes, and this would be more")
        if len(names) >= self._most_files and not place.exists():
            raise ToolError(f"the workspace may hold {self._most_files} files, and this would be one more")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        except OSError as error:
            raise ToolError(f"{name!r} cannot be written ({error.strerror})") from error

    def contents(self) -> dict[str, bytes]:
        """Every file."""
        return {name: (self.root / name).read_bytes() for name in self.names()}

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Make these the files there are; what would be too much is refused, and the rest is there."""
        for name in self.names():
            if name not in files:
                (self.root / name).unlink()
        for name, data in files.items():
            place = self.place(name)
            if not place.is_file() or place.read_bytes() != data:
                self.write(name, data)


@contextmanager
def folder() -> Iterator[Folder]:
    """A new and empty one, among the temporary files."""
    root = Path(tempfile.mkdtemp(prefix="miles-attempt-"))
    try:
        yield Folder(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
