"""Every file of a run directory, damaged in turn: each command says so in a sentence, or works."""

import shutil
from pathlib import Path

import pytest
from tests.launch.small_run import write_inputs
from tests.launch.test_file_faults import command

from miles.launch.commands import train as train_command
from miles.launch.main import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "plot_curves", lambda *args: False)
        assert main(command(inputs, run)) == 0
    return run


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x80
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS = (cut, empty, flip, remove, replace_by_folder)


def damage(finished: Path, folder: Path, name: str, harm) -> Path:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(finished, run)
    harm(run / name)
    return run


def check(argv: list[str], capsys, expected: str) -> None:
    """The command works, or ends with sentences."""
    status = main(argv)
    error = capsys.readouterr().err
    assert status in (0, 1, 2), expected
    assert "Traceback" not in error, expected
    if status:
        assert all(line.startswith("miles: ") for line in error.strip().splitlines()), expected + error


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_config_file_is_a_sentence_for_every_command(inputs, finished, tmp_path, capsys, harm):
    run = damage(finished, tmp_path, "config.toml", harm)
    check(["show", str(run), "--no-color"], capsys, "show")
    check(["engines", str(run)], capsys, "engines")
    check(["plan", str(run / "config.toml")], capsys, "plan")
    check(["replay", str(run), "2"], capsys, "replay")
    assert main(command(inputs, run)) == 1
    assert capsys.readouterr().err.startswith("miles: ")


@pytest.mark.parametrize("name", ["manifest.json", "cursor.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_a_sentence(inputs, finished, tmp_path, capsys, name, harm):
    run = damage(finished, tmp_path, f"checkpoints/step-000002/{name}", harm)
    assert main(command(inputs, run)) == 1
    error = capsys.readouterr().err
    assert error.startswith("miles: ") and "step-000002" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("harm", HARMS)
def test_every_file_of_a_run_may_be_damaged(inputs, finished, tmp_path, capsys, harm, monkeypatch):
    monkeypatch.setattr(train_command, "plot_curves", lambda *args: False)
    files = sorted(str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file())
    assert len(files) > 10
    for name in files:
        run = damage(finished, tmp_path, name, harm)
        check(["show", str(run), "--no-color"], capsys, f"show {name}")
        check(["replay", str(run), "2"], capsys, f"replay {name}")
        check(["plan", str(run / "config.toml")], capsys, f"plan {name}")
        argv = command(inputs, run)
        argv[argv.index("--num-rollout") + 1] = "3"
        check(argv, capsys, f"train {name}")
