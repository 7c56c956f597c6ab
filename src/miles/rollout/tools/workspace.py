"""A trajectory's workspace: a temporary folder, removed on close, that no path can leave."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from miles.rollout.tools.tool import ToolError


class Workspace:
    """Regular files under ``root``, at most ``max_bytes`` together and ``max_files``.

    Links are never followed and never listed: another process in the folder (an MCP server) may have made some.
    """

    def __init__(self, root: Path, *, max_bytes: int = 64 << 20, max_files: int = 1000) -> None:
        self.root = root.resolve()
        self._max_bytes = max_bytes
        self._max_files = max_files

    def resolve(self, name: str) -> Path:
        """The path of ``name``; ToolError when that is outside the workspace."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ToolError(f"{name!r} is not a path inside the workspace")
        path = self.root / path
        if path.resolve() != path:  # a link somewhere on the way
            raise ToolError(f"{name!r} is a link, and links are not followed")
        return path

    def names(self) -> list[str]:
        """Sorted names of all files, relative to the root."""
        found: list[str] = []
        for here, folders, files in os.walk(self.root):
            folders.sort()
            at = Path(here)
            found += [str((at / name).relative_to(self.root)) for name in files if not (at / name).is_symlink()]
        return sorted(found)

    def read(self, name: str) -> bytes:
        path = self.resolve(name)
        if not path.is_file():
            raise ToolError(f"there is no file {name!r}")
        return path.read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self.resolve(name)
        if path == self.root or path.is_dir():
            raise ToolError(f"{name!r} is a folder")
        names = self.names()
        others = sum((self.root / other).stat().st_size for other in names if other != str(PurePosixPath(name)))
        if others + len(data) > self._max_bytes:
            raise ToolError(f"the workspace may hold {self._max_bytes} bytes, and this would be more")
        if len(names) >= self._max_files and not path.exists():
            raise ToolError(f"the workspace may hold {self._max_files} files, and this would be one more")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise ToolError(f"{name!r} cannot be written ({error.strerror})") from error

    def contents(self) -> dict[str, bytes]:
        """All files by name."""
        return {name: (self.root / name).read_bytes() for name in self.names()}

    def replace(self, files: Mapping[str, bytes]) -> None:
        """Replace all files by these; ToolError for one that exceeds the limits, after the others are written."""
        for name in self.names():
            if name not in files:
                (self.root / name).unlink()
        for name, data in files.items():
            path = self.resolve(name)
            if not path.is_file() or path.read_bytes() != data:
                self.write(name, data)


@contextmanager
def temporary_workspace(max_bytes: int = 64 << 20, max_files: int = 1000) -> Iterator[Workspace]:
    """Create an empty workspace in the temporary folder and remove it on exit."""
    root = Path(tempfile.mkdtemp(prefix="miles-workspace-"))
    try:
        yield Workspace(root, max_bytes=max_bytes, max_files=max_files)
    finally:
        shutil.rmtree(root, ignore_errors=True)
