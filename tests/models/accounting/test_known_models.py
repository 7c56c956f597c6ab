"""Published sizes say where they come from, what packages have is what they have, and recipes know their model."""

import json
import re
from pathlib import Path

import pytest

from miles.launch.main import main
from miles.launch.recipes.catalog import list_recipes
from miles.models.accounting.known_models import find_known_config, find_source, load_known_models, load_sources

ROOT = Path(__file__).parents[3]
MEMORY = "from memory, unverified"
PACKAGE = r"(megatron-bridge|transformers) \d+\.\d+\.\d+, |(keys of )?the published config (as|that) "
DEFAULTS = re.compile(r"transformers 5\.17\.0, defaults of (\w+)(?:: all but ([^;]+))?")


def test_every_published_size_says_where_it_comes_from():
    sources = load_sources()
    assert sources.keys() == load_known_models().keys()
    for name, source in sources.items():
        assert source == MEMORY or re.match(PACKAGE, source), name
        assert "source" not in load_known_models()[name]
    assert find_source("Qwen/qwen3-0.6b") == sources["Qwen3-0.6B"] and find_source("Qwen9-1B") is None


def test_a_plan_shows_the_source_of_published_sizes_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "Qwen3-0.6B"]) == 0
    assert f"sizes        {find_source('Qwen3-0.6B')}" in capsys.readouterr().out
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_known_models()["Qwen3-0.6B"]))
    assert main(["plan", str(folder)]) == 0
    assert "sizes   " not in capsys.readouterr().out


def test_recipes_and_the_readme_name_published_sizes():
    shapes = {recipe.shape for recipe in list_recipes() if recipe.shape}
    named = set(re.findall(r"miles plan ([A-Z][\w.-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert shapes and {name for name in shapes | named if find_known_config(name) is None} <= {"MODEL"}


@pytest.mark.parametrize("name", [name for name, source in load_sources().items() if DEFAULTS.search(source)])
def test_sizes_from_transformers_are_the_defaults_of_its_class(name: str):
    transformers = pytest.importorskip("transformers", minversion="5.17", reason="the release that the sizes are from")
    if transformers.__version__ != "5.17.0":
        pytest.skip("the sizes are the defaults of transformers 5.17.0")
    found = DEFAULTS.search(load_sources()[name])
    assert found is not None
    other = set(re.findall(r"\w+_\w+", found[2] or ""))
    config = getattr(transformers, found[1])().to_dict()
    config |= config.get("text_config") or {}
    row = dict(load_known_models()[name])
    row |= row.pop("text_config", {})
    sizes = {key: value for key, value in row.items() if isinstance(value, int) and not isinstance(value, bool)}
    each = row["num_hidden_layers"]
    wrong = {key for key, value in sizes.items() if config.get(key) not in (value, [value] * each)}
    assert wrong <= other and len(sizes.keys() - wrong) >= 5, wrong - other
