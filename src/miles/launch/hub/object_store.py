"""Checkpoints in object stores (S3, GCS and whatever fsspec reads): copied to a local cache before they are read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.cluster.hub_client import CONFIG_FILES, WEIGHT_FILES, HubError
from miles.core.errors import describe_error

EXTRAS: Mapping[str, tuple[str, str]] = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}
"""The package that reads a scheme, and the extra that installs it."""
_RECORD = ".staged.json"


def get_staging_folder() -> Path:
    """Where copies are kept: MILES_CACHE, or ~/.cache/miles."""
    return Path(os.environ.get("MILES_CACHE") or Path.home() / ".cache" / "miles").resolve() / "remote"


def stage_checkpoint(url: str, *, weights: bool) -> tuple[Path, int]:
    """The folder of a copy of the checkpoint at ``url``, and the bytes of it that were not asked for.

    Files that have changed at ``url`` are copied again. Each is there whole or not at all; without ``weights`` only the
    config and the tokenizer are copied.
    """
    store, path = open_store(url)
    try:
        listing = {Path(file["name"]).name: file for file in store.ls(path, detail=True) if file["type"] == "file"}
    except Exception as error:  # every store has errors of its own
        raise HubError(f"{url} cannot be listed: {describe_error(error)}") from error
    patterns = (*CONFIG_FILES, *WEIGHT_FILES)
    wanted = {name: file for name, file in listing.items() if any(Path(name).match(p) for p in patterns)}
    if not any(name.endswith("config.json") for name in wanted):
        raise HubError(f"{url} has no config.json; name the folder of a Hugging Face checkpoint.")
    folder = _get_copy_folder(url)
    missing = _find_missing(folder, wanted)
    chosen = [name for name in missing if weights or not name.endswith(".safetensors")]
    _copy(store, url, folder, {name: wanted[name] for name in chosen})
    return folder, sum(int(wanted[name]["size"]) for name in missing if name not in chosen)


def open_store(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a URL names, and the path in it; HubError if what it needs is not installed."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise _explain_import(url, error) from error
    except ValueError as error:
        raise HubError(f"{url} cannot be used: {describe_error(error)}") from error


def url_from_folder(folder: str) -> str | None:
    """The URL that ``folder`` is a copy of; None for any other folder."""
    root = get_staging_folder()
    if not Path(folder).is_relative_to(root):
        return None
    scheme, *rest = Path(folder).relative_to(root).parts
    return f"{scheme}://{'/' if scheme == 'file' else ''}{'/'.join(rest)}"


def _get_copy_folder(url: str) -> Path:
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part]
    if ".." in parts:
        raise HubError(f"{url} has .. in its path; name the folder itself.")
    return get_staging_folder().joinpath(scheme, *parts)


def _find_missing(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The files that were never copied, or have changed since."""
    copied = _read_record(folder)
    return [name for name, file in wanted.items() if copied.get(name) != _mark(file) or not (folder / name).is_file()]


def _mark(file: Mapping[str, Any]) -> str:
    """What changes when a file of the store does: its size and entity tag, or else its time."""
    tag = next((file[key] for key in ("ETag", "etag", "md5Hash", "mtime", "created") if file.get(key)), "")
    return f"{file['size']} {tag}"


def _read_record(folder: Path) -> dict[str, str]:
    try:
        return json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _copy(store: Any, url: str, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    if not files:
        return
    from huggingface_hub.utils import tqdm

    total = sum(int(file["size"]) for file in files.values())
    folder.mkdir(parents=True, exist_ok=True)
    record = _read_record(folder)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Copying {url}", file=sys.stderr) as bar:
        for name, file in files.items():
            part = folder / f"{name}.part"
            try:
                store.get_file(file["name"], str(part))
            except Exception as error:  # every store has errors of its own
                raise HubError(f"{url}/{name} cannot be copied to {folder}: {describe_error(error)}") from error
            os.replace(part, folder / name)
            record[name] = _mark(file)
            part.write_text(json.dumps(record, indent=1, sort_keys=True), encoding="utf-8")
            os.replace(part, folder / _RECORD)
            bar.update(int(file["size"]))


def _explain_import(url: str, error: ImportError) -> HubError:
    scheme = url.partition("://")[0]
    package, extra = EXTRAS.get(scheme, (scheme, ""))
    fix = f"pip install 'miles-rl[{extra}]'" if extra else f"install what fsspec needs for it ({error})"
    return HubError(f"{url} needs the package {package}: {fix}.")
