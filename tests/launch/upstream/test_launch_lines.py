"""Launch lines of upstream plan as they stand, or are refused for a feature that is missing."""

from pathlib import Path

import pytest
from tests.launch.upstream.launch_lines import LaunchLine, read_launch_lines, write_files

from miles.core.errors import UsageError
from miles.launch.plan.render import as_json, as_text
from miles.launch.read_config import read

LINES = read_launch_lines()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_launch_line_plans_unchanged_or_names_the_missing_feature(
    line: LaunchLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_files(tmp_path, line.model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if line.missing is None:
        config, plan, origins = read("plan", line.words)
        assert "disagrees" not in as_text(config, plan, origins, every=True)
        assert as_json(config, plan, origins)
        return
    with pytest.raises(UsageError) as refused:
        read("plan", line.words)
    assert all(line.missing in problem for problem in refused.value.problems)


def test_there_are_lines_of_every_kind():
    planned = [line for line in LINES if line.missing is None]
    assert len(planned) >= 45 and len({line.model for line in LINES}) >= 20
