"""`miles recipes`, `miles init` and `miles compare`."""

import json
import math
from pathlib import Path

import pytest

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.core.errors import DataError
from miles.launch.config import Config
from miles.launch.main import main
from miles.launch.recipes.catalog import Recipe, list_recipes, parse_recipe, read_recipe
from miles.launch.recipes.reference_curve import read_curve
from miles.launch.recipes.standalone import format_standalone

RECIPES = list_recipes()


# -- recipes --------------------------------------------------------------------------------


def list_names(capsys: pytest.CaptureFixture[str], *flags: str) -> set[str]:
    assert main(["recipes", *flags]) == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    return {line.split()[0] for line in table}


def test_recipes_are_listed_and_filtered(capsys: pytest.CaptureFixture[str]):
    every = list_names(capsys)
    assert every == {recipe.name for recipe in RECIPES}
    found = list_names(capsys, "--family", "QWEN3", "--hardware", "8xh100", "--task", "dapo")
    assert found == {"qwen3/8b_dapo_8xh100", "qwen3/32b_dapo_2x8xh100"}
    assert list_names(capsys, "--hardware", "mi300x") == {name for name in every if "mi300x" in name}


def test_a_filter_without_a_match_says_so(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "--family", "abacus"]) == 1
    assert "No recipe matches" in capsys.readouterr().out


def test_a_recipe_is_described_with_its_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["recipes", "deepseek/v3_gspo_16x8xh200"]) == 0
    shown = capsys.readouterr().out
    assert "96 GPUs train (expert 32); engines of 8 on 32 others" in shown
    assert "tried     planned only" in shown and "127 GB usable" in shown and "of a node's host memory" in shown


def test_an_unknown_recipe_is_refused_with_similar_names(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "qwen3/8b_dapo"]) == 2
    assert "did you mean qwen3/8b_dapo_8xh100 or qwen3/8b_dapo_8xmi300x?" in capsys.readouterr().err
    assert main(["init", "tasks/sft"]) == 2  # a part of recipes is none


# -- init -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_copy_says_all_that_the_recipe_and_its_includes_say(recipe: Recipe, tmp_path: Path):
    file = tmp_path / "copy.toml"
    file.write_text(format_standalone(recipe.layers, ["A copy."]))
    assert len(read_layers(str(file))) == 1
    copy = read_recipe(file, tmp_path)
    assert parse_recipe(copy) == parse_recipe(recipe)
    assert (copy.title, copy.hardware, copy.tried) == (recipe.title, recipe.hardware, recipe.tried)


def test_init_writes_a_copy_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "qwen3/0.6b_gsm8k_1x24gb"]) == 0
    text = Path("0.6b_gsm8k_1x24gb.toml").read_text()
    assert "include" not in text.replace("includes", "") and "# 512 trajectories a step" in text
    assert main(["init", "qwen3/0.6b_gsm8k_1x24gb"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["init", "qwen3/0.6b_gsm8k_1x24gb", "--output", "a.yaml"]) == 2
    assert "is not a .toml file" in capsys.readouterr().err


def test_relative_paths_of_a_recipe_become_absolute_in_a_copy(tmp_path: Path):
    (tmp_path / "in").mkdir()
    own = tmp_path / "in" / "own.toml"
    own.write_text('prompt_data = ["rows.jsonl"]\nsave = "runs/a"\n')
    copy = tmp_path / "copy.toml"
    copy.write_text(format_standalone(read_layers(str(own)), []))
    config = parse(Config, (), read_layers(str(copy))).config
    assert config is not None
    assert config.rollout.prompt_data == (str(tmp_path / "in" / "rows.jsonl"),)
    assert config.schedule.save == str(tmp_path / "in" / "runs/a")


# -- compare --------------------------------------------------------------------------------


def write_run(folder: Path, rewards: list[float]) -> Path:
    """A run with these rewards, and a held-out one every ten steps."""
    folder.mkdir()
    (folder / "config.toml").write_text("")
    lines = [{"kind": "train", "step": step, "reward": value} for step, value in enumerate(rewards, 1)]
    lines += [
        {"kind": "eval", "step": step, "eval/a/reward": rewards[step - 1]} for step in range(10, len(rewards), 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def learn(speed: float, noise: float, steps: int = 100) -> list[float]:
    return [1 - math.exp(-speed * step) + noise * math.sin(step) for step in range(steps)]


@pytest.fixture
def curve(tmp_path: Path) -> Path:
    runs = [str(write_run(tmp_path / f"seed-{i}", learn(0.03 + 0.001 * i, 0.01))) for i in range(3)]
    file = tmp_path / "mine.json"
    flags = ["--write-reference", str(file), "--metrics", "reward", "eval/a/reward"]
    assert main(["compare", *runs, *flags]) == 0
    return file


def test_the_runs_of_a_curve_and_others_like_them_are_on_it(
    curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = write_run(tmp_path / "other", learn(0.0315, 0.02))
    assert main(["compare", str(tmp_path / "seed-0"), str(other), "--reference", str(curve)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("is on the curve") == 2 and "10 of 10 windows inside" in shown


@pytest.mark.parametrize("rewards", [learn(0.002, 0.01), [0.0] * 100, learn(0.03, 0.01)[:50] + [0.2] * 50])
def test_a_run_that_learns_too_slowly_or_breaks_down_is_off_the_curve(
    rewards: list[float], curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "bad", rewards)
    assert main(["compare", str(run), "--reference", str(curve)]) == 1
    shown = capsys.readouterr().out
    assert "NOT on the curve: reward" in shown and "first outside at step" in shown


def test_an_unfinished_run_is_compared_as_far_as_it_has_come(
    curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "short", learn(0.031, 0.01, steps=35))
    assert main(["compare", str(run), "--reference", str(curve)]) == 0
    assert "3 of 3 windows inside" in capsys.readouterr().out
    none = write_run(tmp_path / "none", learn(0.031, 0.01, steps=5))
    assert main(["compare", str(none), "--reference", str(curve)]) == 2
    assert "let it run longer" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(curve: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = str(tmp_path / "seed-0")
    for words, sentence in (
        ([run], "needs --reference RECIPE to compare with, or --write-reference"),
        ([run, "--reference", "qwen3/8b_dapo_8xh100"], "has no reference curve: it was planned only"),
        ([run, "--write-reference", str(tmp_path / "b.json")], "at least two runs"),
        ([str(tmp_path), "--reference", str(curve)], "is not a run"),
    ):
        assert main(["compare", *words]) == 2
        assert sentence in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"metrics": 3}')
    with pytest.raises(DataError, match="is not a reference curve"):
        read_curve(broken)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.curve is not None], ids=lambda recipe: recipe.name)
def test_a_curve_that_is_shipped_is_of_several_seeds_and_rises(recipe: Recipe):
    assert recipe.curve is not None
    found = read_curve(recipe.curve)
    held_out = found.metrics["eval/heldout/reward"]
    assert found.runs >= 3 and set(found.metrics) >= {"reward", "entropy", "response_length"}
    assert held_out.low[-1] > held_out.mean[0]
