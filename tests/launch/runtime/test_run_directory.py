"""Run directories: whose they are, and what a killed process may have left in them."""

from pathlib import Path

import pytest

from miles.config.cli import parse
from miles.config.provenance import flatten_values
from miles.core.errors import ResumeError
from miles.launch.config import Config
from miles.launch.runtime.run_directory import RunDirectory


def claim(path: Path) -> RunDirectory:
    config = parse(Config, ()).config
    assert config is not None
    directory = RunDirectory(path)
    directory.claim(config, dict.fromkeys(flatten_values(config), "default"))
    directory.release()
    return directory


def test_a_run_killed_while_its_config_was_written_can_be_continued(tmp_path: Path):
    (tmp_path / "lock").touch()
    (tmp_path / "config.part").write_text("[schedu")
    claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "lock"]


def test_a_directory_with_other_files_is_no_run(tmp_path: Path):
    (tmp_path / "thesis.part").touch()
    with pytest.raises(ResumeError, match="is not empty and is not a run"):
        claim(tmp_path)
