"""Run directories: whose they are, and what a killed process may have left in them."""

from pathlib import Path

import pytest

from miles.config.cli import parse
from miles.config.provenance import flatten_values
from miles.core.errors import ResumeError
from miles.launch.config import Config
from miles.launch.runtime.run_directory import MAY_CHANGE, RunDirectory, read_run_config


def claim(path: Path, *words: str) -> RunDirectory:
    config = read(*words)
    directory = RunDirectory(path)
    directory.claim(config, dict.fromkeys(flatten_values(config), "default"))
    directory.release()
    return directory


def read(*words: str) -> Config:
    config = parse(Config, words).config
    assert config is not None
    return config


MEGATRON = ("--train-backend", "megatron")
SHARDED = (*MEGATRON, "--megatron-use-distributed-optimizer", "--megatron-recompute-modules", "core_attn", "mlp")
BALANCED = (*MEGATRON, "--megatron-moe-aux-loss-coeff", "0.1")


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [
        (SHARDED, MEGATRON, set()),
        (SHARDED, (), set()),
        ((), SHARDED, set()),
        (BALANCED, (*SHARDED, *BALANCED[2:]), set()),
        (BALANCED, MEGATRON, {"megatron_flags"}),
        (BALANCED, (*MEGATRON, "--megatron-moe-aux-loss-coeff", "0.2"), {"megatron_flags"}),
    ],
)
def test_a_run_may_change_its_trainer_and_how_that_shards_but_not_its_losses(tmp_path: Path, first, then, refused):
    directory = claim(tmp_path, *first)
    found = directory._find_differences(read_run_config(tmp_path), read(*then))
    assert found.keys() - MAY_CHANGE == refused


def test_a_run_killed_while_its_config_was_written_can_be_continued(tmp_path: Path):
    (tmp_path / "lock").touch()
    (tmp_path / "config.part").write_text("[schedu")
    claim(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "lock"]


def test_a_directory_with_other_files_is_no_run(tmp_path: Path):
    (tmp_path / "thesis.part").touch()
    with pytest.raises(ResumeError, match="is not empty and is not a run"):
        claim(tmp_path)
