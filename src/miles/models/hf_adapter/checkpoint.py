"""Checkpoints of the transformers adapter: loaded and saved by transformers, with errors where it would only warn."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.core.media import Images
from miles.core.media_store import MediaStore
from miles.models.checkpoint.safetensors_io import copy_tokenizer_files, read_config, write_atomically, write_json
from miles.models.hf_adapter.attention import UnsupportedModelError, register
from miles.models.hf_adapter.decoder import HfDecoder
from miles.models.hf_adapter.equivalence_check import verify_images, wrap_verified
from miles.models.hf_adapter.spec import build_hf_adapter_spec
from miles.models.media_config import has_image_processor
from miles.models.processor import MultimodalProcessor, load_processor


def load(
    folder: Path | str, *, device: torch.device | str, dtype: torch.dtype, trust_remote_code: bool = False
) -> HfDecoder:
    """Load the checkpoint as transformers' own module, verified to give equal logits through our attention backends."""
    spec = build_hf_adapter_spec(read_config(folder), folder)
    module = _module(Path(folder), dtype, trust_remote_code).to(device)
    register()
    try:
        with _quietly():
            decoder = wrap_verified(module, spec)
            if spec.vision is not None and has_image_processor(folder):
                verify_images(decoder, *_make_prompt(Path(folder), decoder, trust_remote_code))
            return decoder
    except UnsupportedModelError as error:
        name = type(module).__name__
        raise UsageError(f"--model-impl transformers cannot run {name} of {folder}: {error}") from error


def _make_prompt(folder: Path, decoder: HfDecoder, trust_remote_code: bool) -> tuple[Tensor, Images]:
    """A prompt with two images of noise, as the checkpoint's processor expands it."""
    processor = load_processor(folder, media=MediaStore(), trust_remote_code=trust_remote_code)
    assert isinstance(processor, MultimodalProcessor)
    references = [processor.media.put(_draw_noise(seed)) for seed in (0, 1)]
    marker = processor.image_marker
    tokens, images = processor.encode_with_images(f"{marker}1{marker}2", references)
    return torch.tensor(tokens, device=decoder.head().device), images


def _draw_noise(seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (96, 128, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def tensors(folder: Path | str, *, like: HfDecoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load every tensor of a checkpoint of the same architecture as ``like``, by its names, on the host."""
    # Remote code runs again only if it was trusted when ``like`` was loaded.
    trusted = "transformers_modules" in type(like.module).__module__
    return dict(_module(Path(folder), dtype, trusted).state_dict())


def _module(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    takes_images = build_hf_adapter_spec(read_config(folder), folder).vision is not None
    loader = cast(Any, AutoModelForImageTextToText if takes_images else AutoModelForCausalLM)
    try:
        with _quietly():
            module, info = loader.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,  # torch.load of a pickle would run its code
                ignore_mismatched_sizes=True,  # reported in the loading info and rejected below
                output_loading_info=True,
            )
    except Exception as error:  # any error of the loader
        if "trust_remote_code" in str(error):
            raise UsageError(f"The model in {folder} runs its own code; allow it with --trust-remote-code.") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"transformers cannot load {folder} ({reason}).") from error
    _check_loading_info(folder, info)
    return module


def _check_loading_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Reject what transformers initializes randomly or leaves out with a warning."""
    unknown = sorted(name for name in info["unexpected_keys"] if not name.endswith("inv_freq"))
    for names, what in (
        (sorted(info["missing_keys"]), "is missing from"),
        (sorted(key[0] for key in info["mismatched_keys"]), "has another shape than config.json says in"),
        (unknown, "belongs to no part of the model in"),
    ):
        if names:
            more = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
            raise CheckpointError(f"{names[0]}{more} {what} {folder}, as transformers reads it.")
    if info["error_msgs"]:
        raise CheckpointError(f"transformers cannot load {folder} ({info['error_msgs'][0].strip().splitlines()[0]}).")


@contextmanager
def _quietly() -> Iterator[None]:
    """Disable progress bars and warnings of transformers."""
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
    decoder: HfDecoder,
    folder: Path | str,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers loads: weights as it saves them, ``config.json`` last, and the other files of
    ``like``.

    The config is the one given, else that of ``like``, else transformers' own. Each file is written atomically.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drafts = folder / ".drafts.partial"
    shutil.rmtree(drafts, ignore_errors=True)
    with _quietly():
        decoder.module.save_pretrained(drafts)
    info = dict(config or read_config(drafts if like is None else like))
    weights = sorted(file.name for file in drafts.iterdir() if ".safetensors" in file.name)
    for name in weights:
        _publish(drafts / name, folder / name)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in weights:
            old.unlink()
    shutil.rmtree(drafts)
    if like is not None:
        copy_tokenizer_files(Path(like), folder)
        _copy_code(Path(like), folder)
    info.pop("torch_dtype", None)
    info["dtype"] = str(decoder.head().dtype).removeprefix("torch.")
    write_json(folder / "config.json", info)


def _publish(draft: Path, target: Path) -> None:
    for path in (draft, draft.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    os.replace(draft, target)


def _copy_code(source: Path, folder: Path) -> None:
    """Copy the Python files that a checkpoint with remote code needs."""
    for file in source.glob("*.py"):
        if source.resolve() != folder.resolve():
            content = file.read_bytes()
            write_atomically(folder / file.name, lambda out, content=content: out.write(content))
