"""Hugging Face hub client: find a repository's files in the cache, and download those that are missing.

The cache comes first: what is complete there is used without a request. ``huggingface_hub`` reads HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE, shows the progress bars, and is imported only when a name on the hub is used.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from miles.core.errors import MilesError
from miles.core.hub_names import HubName

CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "README.md", "LICENSE*")
WEIGHT_FILES = ("*.safetensors",)
_SUBFOLDERS = ("*/*",)
_SNAPSHOT = re.compile(r".*/(?P<kind>models|datasets)--(?P<repo>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")
_INDEX = "model.safetensors.index.json"


class HubError(MilesError):
    """A repository of the hub that can be neither found in the cache nor downloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The files of one revision in the cache; ``missing_bytes`` were not downloaded because they were not asked for."""

    name: HubName
    folder: Path
    missing_bytes: int = 0


def fetch_model(name: HubName, *, weights: bool) -> Snapshot:
    """The snapshot of a model with its config and tokenizer and, if asked for, its weights; downloads what it lacks."""
    patterns = (*CONFIG_FILES, *WEIGHT_FILES)
    cached = find_cached(name, patterns, _SUBFOLDERS)
    if cached is not None and _has_all_weights(cached.folder):
        return cached
    if weights:
        return download(name, patterns, _SUBFOLDERS)
    fetched = find_cached(name, CONFIG_FILES, _SUBFOLDERS)
    if fetched is None or not list(fetched.folder.glob("*config.json")):
        fetched = download(name, CONFIG_FILES, _SUBFOLDERS)
    try:
        missing = measure_download(fetched.name, patterns, _SUBFOLDERS)
    except HubError:  # the plan needs no weights
        missing = 0
    return replace(fetched, missing_bytes=missing)


def _has_all_weights(folder: Path) -> bool:
    """Whether every file of the index is there; a cache written by an old client may hold a part of a snapshot."""
    index = folder / _INDEX
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / file).is_file() for file in files)
    return any(folder.glob("*.safetensors"))


def find_cached(name: HubName, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Snapshot | None:
    """The snapshot in the cache; None if it, or a file known to match the patterns, is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=True,
            cache_dir=get_cache_folder(),
        )
    except LocalEntryNotFoundError:
        return None
    return _build_snapshot(name, folder)


def download(name: HubName, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Snapshot:
    """Download what the cache lacks of the files that match; HubError says what to do where that is impossible."""
    from huggingface_hub import constants, snapshot_download

    size = measure_download(name, patterns, ignored)
    if size:
        sys.stderr.write(f"Downloading {name.repo}, {size / 1e6:,.1f} MB, to {get_cache_folder()}\n")
    try:
        folder = snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            cache_dir=get_cache_folder(),
            endpoint=constants.ENDPOINT,
        )
    except Exception as error:
        raise _explain(name, error) from error
    return _build_snapshot(name, folder)


def measure_download(name: HubName, patterns: Sequence[str], ignored: Sequence[str] = ()) -> int:
    """How many bytes of the files that match are not in the cache, from the hub's listing."""
    from huggingface_hub.utils import filter_repo_objects

    revision, sizes = _list_sizes(name)
    folder = Path(get_cache_folder(), f"{name.kind}s--{name.repo.replace('/', '--')}", "snapshots", revision)
    wanted = filter_repo_objects(sizes, allow_patterns=list(patterns), ignore_patterns=list(ignored))
    return sum(sizes[file] for file in wanted if not (folder / file).exists())


def list_files(name: HubName) -> list[str]:
    """The files of a repository on the hub."""
    return list(_list_sizes(name)[1])


def _list_sizes(name: HubName) -> tuple[str, dict[str, int]]:
    """The commit of a revision on the hub, and the size of each of its files."""
    from huggingface_hub import HfApi

    api = HfApi()
    read_info = api.model_info if name.kind == "model" else api.dataset_info
    try:
        info = read_info(name.repo, revision=name.revision, files_metadata=True)
    except Exception as error:
        raise _explain(name, error) from error
    return info.sha or "", {file.rfilename: file.size or 0 for file in info.siblings or ()}


def list_known_files(snapshot: Snapshot) -> list[str]:
    """The files of a revision as far as the cache knows: by its listing, else those that are there."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    name = snapshot.name
    try:
        tree = get_cached_repo_tree(
            name.repo, repo_type=name.kind, revision=name.revision, cache_dir=get_cache_folder()
        )
    except CachedRepoTreeNotFoundError:
        files = (file for file in snapshot.folder.rglob("*") if file.is_file())
        return [str(file.relative_to(snapshot.folder)) for file in files]
    return [file.path for file in tree]


def name_from_folder(folder: str) -> HubName | None:
    """The model and revision whose snapshot in the cache ``folder`` is; None for any other folder."""
    found = _SNAPSHOT.fullmatch(folder)
    if found is None or not folder.startswith(get_cache_folder()):
        return None
    kind = "model" if found["kind"] == "models" else "dataset"
    return HubName(kind=kind, repo=found["repo"].replace("--", "/"), revision=found["revision"])


def get_model_name(path: str) -> str:
    """The last part of a model's name: of a folder, of a name on the hub, or of a snapshot in the cache.

    >>> get_model_name("models/Qwen3-0.6B/"), get_model_name("Qwen/Qwen3-0.6B@main")
    ('Qwen3-0.6B', 'Qwen3-0.6B')
    """
    found = _SNAPSHOT.fullmatch(path)
    if found is not None:
        return found["repo"].rpartition("--")[2]
    if "://" in path or not Path(path).exists():
        path = path.partition("@")[0]
    return Path(path.rpartition("://")[2]).resolve().name


def get_cache_folder() -> str:
    """Where huggingface_hub keeps what it downloads."""
    from huggingface_hub import constants

    return str(Path(constants.HF_HUB_CACHE).expanduser().resolve())


def _build_snapshot(name: HubName, folder: str) -> Snapshot:
    return Snapshot(name=replace(name, revision=Path(folder).name), folder=Path(folder))


def _explain(name: HubName, error: Exception) -> HubError:
    """The sentence for what ``huggingface_hub`` raised."""
    from huggingface_hub import constants, errors

    known = f"{name.kind} {name.repo}"
    match error:
        case errors.GatedRepoError():
            return HubError(
                f"{known} is gated: accept its conditions at {constants.ENDPOINT}/{name.repo}, and set HF_TOKEN."
            )
        case errors.RevisionNotFoundError():
            return HubError(f"{known} has no revision {name.revision or 'main'}; name a branch, a tag or a commit.")
        case errors.RepositoryNotFoundError():
            return HubError(
                f"There is no {known} at {constants.ENDPOINT} for this user; check the name, set HF_TOKEN if it is "
                "private, or give the path of a folder."
            )
        case errors.HfHubHTTPError():
            return HubError(f"The hub refused {known}: {str(error).splitlines()[0]}")
        case errors.HFValidationError():
            return HubError(f"{name.repo} is not a name on the hub; write ORG/NAME.")
    if isinstance(error, OSError) and error.errno is not None:
        return HubError(f"{known} cannot be written to {get_cache_folder()}: {error.strerror}; set HF_HOME.")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
    folder = f"{name.kind}s--{name.repo.replace('/', '--')}"
    kind = "" if name.kind == "model" else " --repo-type dataset"
    revision = "" if name.revision is None else f" --revision {name.revision}"
    return HubError(
        f"The {known} is not, or not whole, in {get_cache_folder()}, and {reason}: run hf download {name.repo}{kind}"
        f"{revision} on a machine with access, and copy its {folder} into that folder."
    )
