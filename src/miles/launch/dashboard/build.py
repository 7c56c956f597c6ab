"""Builds the queries of the dashboard over run directories: the tokenizer of a run, and its parity tolerance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import miles
from miles.config.cli import parse
from miles.config.files import read_layers
from miles.core.errors import DataError, MilesError
from miles.launch.config import Config
from miles.launch.plan.plan import choose_parity_tolerance
from miles.launch.rules.paths import find_newest_checkpoint
from miles.launch.runtime.run_directory import read_run_config
from miles.observe.dashboard.api import DashboardApi
from miles.observe.dashboard.run_index import RunIndex
from miles.observe.trajectory_view import TokenDecoder

_DEFAULT_TOLERANCE = 0.01


def build_api(roots: Sequence[Path]) -> DashboardApi:
    """Build the queries over the runs at and below ``roots``; DataError if there is no run."""
    index = RunIndex(roots)
    index.refresh()
    if not index.names():
        places = ", ".join(str(root) for root in roots)
        raise DataError(f"There is no run at or below {places}; a run is a directory with a config.toml.")
    docs = Path(miles.__file__).parents[2] / "docs"
    return DashboardApi(
        index,
        load_tokenizer=load_decoder,
        choose_tolerance=choose_tolerance,
        clock=time.time,
        docs=docs if (docs / "index.md").is_file() else None,
    )


class FastDecoder:
    """Decodes with a ``tokenizer.json``, without importing transformers, which takes seconds."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_decoder(run: Path) -> TokenDecoder:
    """Load the tokenizer of the run's newest checkpoint, or of the one it started from."""
    settings = read_run_config(run).get("models", {})
    folder = find_newest_checkpoint(run) or settings.get("hf_checkpoint")
    if folder is None:
        raise DataError(f"{run / 'config.toml'} names no hf_checkpoint, so it is damaged; restore it from a copy.")
    file = Path(folder) / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            return FastDecoder(Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises no other class for a damaged file
            raise DataError(f"{file} cannot be loaded ({error}); restore it from a copy.") from error
    from miles.models.tokenizer import load_tokenizer

    return load_tokenizer(folder, bool(settings.get("trust_remote_code", False)))


def choose_tolerance(run: Path) -> float:
    """Return the parity tolerance that a run's config asks for, or the usual one if it cannot be read any more."""
    try:
        config = parse(Config, [], read_layers(str(run / "config.toml"))).config
    except MilesError:
        config = None
    return _DEFAULT_TOLERANCE if config is None else choose_parity_tolerance(config)
