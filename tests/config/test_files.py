"""Recipes: TOML and YAML, includes, and what is said of a broken one."""

from pathlib import Path

import pytest

from miles.config.files import read_layers
from miles.core.errors import UsageError


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_comes_after_what_it_includes(tmp_path: Path):
    write(
        tmp_path,
        r__run_toml='include = ["../base.yaml", "more.toml"]\nlr = 3\n[algo]\neps_clip = 1\n',
        r__more_toml='include = "../base.yaml"\nlr = 2\n',
        base_yaml="lr: 1\nalgo:\n  eps_clip: 1e-6\n",
    )
    layers = read_layers("r/run.toml")
    assert [layer.label for layer in layers] == ["base.yaml", "base.yaml", "r/more.toml", "r/run.toml"]
    assert layers[0].values == {"lr": 1, "algo": {"eps_clip": "1e-6"}}
    assert layers[-1].values == {"lr": 3, "algo": {"eps_clip": 1}}


def test_an_empty_file_says_nothing(tmp_path: Path):
    write(tmp_path, a_yaml="# nothing\n", b_toml="")
    assert read_layers("a.yaml")[0].values == {} == read_layers("b.toml")[0].values


def test_yaml_anchors_and_merges_work(tmp_path: Path):
    write(tmp_path, a_yml="algo: &x {a: 1, b: 2}\ntrain:\n  <<: *x\n  b: 3\n")
    assert read_layers("a.yml")[0].values["train"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "a.toml does not exist."),
        ({"a_toml": "lr = "}, "a.toml is not valid TOML: Invalid value (at end of document)."),
        ({"a_toml": "lr = 1\nlr = 2"}, "a.toml is not valid TOML: Cannot overwrite a value (at end of document)."),
        ({"a_toml": 'include = "b.toml"'}, "a.toml includes b.toml, which does not exist."),
        (
            {"a_toml": 'include = "b.txt"'},
            "a.toml includes b.txt, which is not a recipe: a recipe is a .toml, .yaml or .yml file.",
        ),
        ({"a_toml": "include = 3"}, "a.toml: include takes texts in brackets, not 3."),
        ({"a_toml": "include = [3]"}, "a.toml: include takes texts, not 3."),
        (
            {"a_toml": 'include = "a.toml"'},
            "a.toml includes a.toml, which includes it in turn (a.toml -> a.toml); remove one include.",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "include: a.toml"},
            "b.yaml includes a.toml, which includes it in turn (a.toml -> b.yaml -> a.toml); remove one include.",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "lr: 1\nlr: 2"},
            "a.toml includes b.yaml, which is not valid YAML: lr is written twice (at line 1 and after).",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "lr: [1"},
            "a.toml includes b.yaml, which is not valid YAML: "
            "expected ',' or ']', but got '<stream end>' (at line 1, column 7).",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "!!python/object:os.system x"},
            "a.toml includes b.yaml, which is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system' (at line 1, column 1).",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "- 1\n- 2"},
            "a.toml includes b.yaml, which must hold keys and values, like lr: 1e-6.",
        ),
        (
            {"a_toml": 'include = "b.yaml"', "b_yaml": "1: 2"},
            "a.toml includes b.yaml, which must hold keys and values, like lr: 1e-6.",
        ),
    ],
)
def test_a_broken_recipe_is_told_in_one_sentence(files: dict[str, str], says: str, tmp_path: Path):
    write(tmp_path, **files)
    with pytest.raises(UsageError) as raised:
        read_layers("a.toml")
    assert raised.value.problems == (says,)


def test_all_broken_includes_are_told_at_once(tmp_path: Path):
    write(tmp_path, a_toml='include = ["b.toml", "c.toml", "d"]')
    with pytest.raises(UsageError) as raised:
        read_layers("a.toml")
    assert len(raised.value.problems) == 3


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"a\.toml cannot be read: it is not UTF-8 text"):
        read_layers("a.toml")


def test_a_folder_is_not_a_recipe(tmp_path: Path):
    (tmp_path / "a.toml").mkdir()
    with pytest.raises(UsageError, match=r"a\.toml cannot be read: Is a directory"):
        read_layers("a.toml")
