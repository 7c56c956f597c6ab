"""Arguments of hooks: flags that a hook declares and keys of --custom-config-path are attributes of its args."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.core.errors import UsageError
from miles.launch.main import main
from miles.launch.read_config import read

HOOK = """
import json
from pathlib import Path

async def grade(args, sample):
    Path(args.seen).write_text(json.dumps([args.bonus, args.mode, args.lr, args.nested, args.strict]))
    return float(len(sample.response)) + args.bonus

def add_arguments(parser):
    group = parser.add_argument_group("grader")
    group.add_argument("--bonus", type=float, default=0.5)
    group.add_argument("--mode", choices=["plain", "loud"], default="plain")
    group.add_argument("--seen", type=str, required=False)
    group.add_argument("--strict", action="store_true")
    group.add_argument("--lr", type=float)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


@pytest.fixture
def line(world: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "grader.py").write_text(HOOK)
    (tmp_path / "more.yaml").write_text("lr: 2e-3\nnested: {a: [1, 2]}\n")
    hook = ("--custom-rm-path", f"{tmp_path / 'grader.py'}:grade", "--custom-config-path", str(tmp_path / "more.yaml"))
    return flags(world, tmp_path / "run", *hook, "--seen", str(tmp_path / "seen.json"), steps=2)


def test_hooks_see_declared_flags_and_keys_of_the_custom_config(line: list[str], tmp_path: Path):
    assert main(["train", *line, "--bonus", "2.5", "--strict"]) == 0
    assert json.loads((tmp_path / "seen.json").read_text()) == [2.5, "plain", 2e-3, {"a": [1, 2]}, True]
    assert read("plan", line)[2]["lr"].endswith("more.yaml")
    (tmp_path / "more.yaml").unlink()
    config, _, _ = read("train", [str(tmp_path / "run" / "config.toml")])
    assert config.hooks.hook_arguments["bonus"] == 2.5 and config.train.lr == 2e-3


def test_a_resumed_run_may_not_have_other_hook_arguments(line: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["train", *line, "--bonus", "2.5"]) == 0
    assert main(["train", *line]) != 0
    assert "hook_arguments was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--mode", "quiet"), "--mode invalid choice: 'quiet'"),
        (("--bonus", "x"), "--bonus invalid float value: 'x'"),
        (("--frobnicate", "1"), "--frobnicate is not a flag"),
        (("--custom-config-path", "absent.yaml"), "absent.yaml does not exist."),
    ],
)
def test_a_wrong_argument_is_refused_in_a_sentence(line: list[str], more: tuple[str, ...], problem: str):
    with pytest.raises(UsageError) as error:
        read("plan", [*line, *more])
    assert any(problem in one for one in error.value.problems), error.value.problems
