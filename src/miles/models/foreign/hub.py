"""Foreign checkpoints in and out: as transformers loads and saves them, refused where it would only warn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.models.files import copy_companions, read_config, write_json, write_whole
from miles.models.foreign.attention import Unfit, register
from miles.models.foreign.check import proven
from miles.models.foreign.decoder import ForeignDecoder
from miles.models.foreign.spec import foreign_spec


def load(
    folder: Path | str, *, device: torch.device | str, dtype: torch.dtype, trust_remote_code: bool = False
) -> ForeignDecoder:
    """The checkpoint as transformers' own module, proven to run our way as it runs its own."""
    spec = foreign_spec(read_config(folder), folder)
    module = _module(Path(folder), dtype, trust_remote_code).to(device)
    register()
    try:
        with _quietly():
            return proven(module, spec)
    except Unfit as error:
        name = type(module).__name__
        raise UsageError(f"--model-impl transformers cannot hold {name} of {folder}: {error}") from error


def tensors(folder: Path | str, *, like: ForeignDecoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of the same architecture as ``like``, by its names, on the host."""
    # Code that came with a model is loaded a second time only where it was trusted the first time.
    trusted = "transformers_modules" in type(like.module).__module__
    return dict(_module(Path(folder), dtype, trusted).state_dict())


def _module(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with _quietly():
            module, told = cast(Any, AutoModelForCausalLM).from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # so that they are told of, and refused in words of ours
                output_loading_info=True,
            )
    except Exception as error:  # whatever a foreign loader raises
        if "trust_remote_code" in str(error):
            raise UsageError(f"The model in {folder} runs its own code; allow it with --trust-remote-code.") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load {folder} ({reason}).") from error
    _complain(folder, told)
    return module


def _complain(folder: Path, told: Mapping[str, Any]) -> None:
    """Refuse what transformers fills with chance or leaves out with a warning."""
    unknown = sorted(name for name in told["unexpected_keys"] if not name.endswith("inv_freq"))
    for names, what in (
        (sorted(told["missing_keys"]), "is missing from"),
        (sorted(key[0] for key in told["mismatched_keys"]), "has another shape than config.json says in"),
        (unknown, "belongs to no part of the model in"),
    ):
        if names:
            more = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
            raise CheckpointError(f"{names[0]}{more} {what} {folder}, as transformers reads it.")
    if told["error_msgs"]:
        raise CheckpointError(f"transformers cannot load {folder} ({told['error_msgs'][0].strip().splitlines()[0]}).")


@contextmanager
def _quietly() -> Iterator[None]:
    """No bars and no reports on the terminal, which is the run's."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def export(
    decoder: ForeignDecoder,
    folder: Path | str,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers loads: weights as it saves them, ``config.json`` last, ``like``'s other files.

    The config is the one given, else ``like``'s, else transformers' own. Each file appears whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drafts = folder / ".drafts.partial"
    shutil.rmtree(drafts, ignore_errors=True)
    with _quietly():
        decoder.module.save_pretrained(drafts)
    told = dict(config or read_config(drafts if like is None else like))
    weights = sorted(file.name for file in drafts.iterdir() if ".safetensors" in file.name)
    for name in weights:
        _put(drafts / name, folder / name)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in weights:
            old.unlink()
    shutil.rmtree(drafts)
    if like is not None:
        copy_companions(Path(like), folder)
        _copy_code(Path(like), folder)
    told.pop("torch_dtype", None)
    told["dtype"] = str(decoder.head().dtype).removeprefix("torch.")
    write_json(folder / "config.json", told)


def _put(draft: Path, place: Path) -> None:
    for path in (draft, draft.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.replace(draft, place)


def _copy_code(source: Path, folder: Path) -> None:
    """The Python files a checkpoint with code of its own cannot be loaded without."""
    for file in source.glob("*.py"):
        if source.resolve() != folder.resolve():
            content = file.read_bytes()
            write_whole(folder / file.name, lambda out, content=content: _void(out.write(content)))


def _void(_: object) -> None:
    """Drop a result, where a callback must return nothing."""
