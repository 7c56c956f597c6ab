"""Request bodies of the admin endpoints: pause, abort, memory, weight updates, sessions, weights checker."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from miles.rollout.serving.body import Count, Int, Number, OneOrMany, RequestBody

PauseModeName = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,20}$")]
MAX_SHOWN_ROWS = 1 << 20


def _check_label(label: str) -> str:
    """A weight version is in every response and in logs."""
    if not label or len(label) > 256 or not label.isprintable():
        raise ValueError("must be 1 to 256 printable characters")
    return label


def _check_path(path: str) -> str:
    if "\0" in path or len(path) > 4096 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise ValueError("is not the path of a folder")
    return path


VersionLabel = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 256}), AfterValidator(_check_label)]
AdapterName = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 256}), AfterValidator(_check_label)]
FolderPath = Annotated[str, AfterValidator(_check_path)]


class AbortBody(RequestBody):
    """``/abort_request``."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(RequestBody):
    """``/pause_generation``."""

    mode: PauseModeName = "abort"


class ContinueBody(RequestBody):
    """``/continue_generation``."""

    torch_empty_cache: bool = False


class MemoryBody(RequestBody):
    """``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: OneOrMany[MemoryTag] | None = None


def _check_name(name: str) -> str:
    """Part of the name of a file: it must not name another folder."""
    if not name or len(name) > 128 or not name.isprintable() or "/" in name or name.startswith("."):
        raise ValueError("must be 1 to 128 printable characters without a slash, and not begin with a dot")
    return name


FileNamePart = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": 128}), AfterValidator(_check_name)]


class StartProfileBody(RequestBody):
    """``/start_profile``."""

    output_dir: FolderPath | None = None
    profile_id: FileNamePart | None = None
    profile_prefix: FileNamePart | None = None


class StopProfileBody(RequestBody):
    """``/stop_profile``."""


class UpdateFields(RequestBody):
    """Fields of every weight update."""

    weight_version: VersionLabel | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: str | None = None


class DiskUpdateBody(UpdateFields):
    """``/update_weights_from_disk``."""

    model_path: FolderPath


class TensorUpdateBody(UpdateFields):
    """``/update_weights_from_tensor`` with JSON."""

    serialized_named_tensors: list[str]


class GroupBody(RequestBody):
    """``/destroy_weights_update_group``."""

    group_name: str = "weight_update_group"


class JoinGroupBody(GroupBody):
    """``/init_weights_update_group``."""

    master_address: str
    master_port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=1 << 20)]
    rank_offset: Annotated[int, Field(ge=1)]
    backend: Literal["nccl", "gloo"] = "nccl"


def _check_sizes(sizes: list[int]) -> list[int]:
    if any(size < 0 for size in sizes):
        raise ValueError("must be a list of sizes")
    return sizes


Shape = Annotated[list[int], AfterValidator(_check_sizes)]


class DistributedUpdateBody(UpdateFields, GroupBody):
    """``/update_weights_from_distributed``. ``staged``: the tensors belong to a publication that is committed later."""

    names: OneOrMany[str]
    dtypes: OneOrMany[str]
    shapes: list[Shape]
    staged: bool = False


class VersionLabelBody(RequestBody):
    """``/update_weight_version``."""

    new_version: VersionLabel
    abort_all_requests: bool = True


class WeightsByNameBody(RequestBody):
    """``/get_weights_by_name``."""

    name: str
    truncate_size: Annotated[int, Field(ge=0, le=MAX_SHOWN_ROWS)] = 100


class OpenSessionBody(RequestBody):
    """``/open_session``."""

    capacity_of_str_len: Int
    session_id: str | None = None
    streaming: bool = False
    timeout: Number | None = None


class CloseSessionBody(RequestBody):
    """``/close_session``."""

    session_id: str


class LoadLoraBody(RequestBody):
    """``/load_lora_adapter``. ``update``, which is ours, replaces an adapter of that name in place."""

    lora_name: AdapterName
    lora_path: FolderPath
    pinned: bool = False
    lora_id: str | None = None
    update: bool = False


class LoraTensorsBody(RequestBody):
    """``/load_lora_adapter_from_tensors``: PEFT's config, and base64 of safetensors files."""

    lora_name: AdapterName
    config_dict: dict[str, Any]
    serialized_tensors: str = ""
    serialized_named_tensors: list[str] = Field(default_factory=list)
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None
    pinned: bool = False
    lora_id: str | None = None
    update: bool = False


class UnloadLoraBody(RequestBody):
    """``/unload_lora_adapter``."""

    lora_name: str
    lora_id: str | None = None


class WeightsCheckerBody(RequestBody):
    """``/weights_checker``; without an action, checksums."""

    action: str = "checksum"


class ManifestEntryBody(RequestBody):
    """A tensor of a publication."""

    name: str
    shape: Shape
    dtype: str


class PublicationBody(UpdateFields):
    """``/weights_publication``: one step of a weight publication, and the fields of each ``action``."""

    action: Literal["where", "begin", "load", "open", "copy", "map", "write", "verify", "commit", "rollback"]
    # begin
    entries: list[ManifestEntryBody] = Field(default_factory=list)
    whole: bool = False
    keeps: bool = False
    # load
    folder: FolderPath = ""
    # open, copy
    windows: list[dict[str, Any]] = Field(default_factory=list)
    window: Count | None = None
    last: bool = False
    names: list[str] = Field(default_factory=list)
    offsets: list[int] = Field(default_factory=list)
    # map, write
    epoch: str = ""
    storages: list[dict[str, Any]] = Field(default_factory=list)
    lie_in: list[int] = Field(default_factory=list)
    dtypes: list[str] = Field(default_factory=list)
    shapes: list[Shape] = Field(default_factory=list)
    which: str | None = None
    pause: PauseModeName | None = None
    # verify, commit
    digests: dict[str, Digest] = Field(default_factory=dict)
    promised: str | None = None
    resume: bool = False
