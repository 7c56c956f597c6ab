"""Generated pages: commands, flags, library, families, drawings and peaks are what the code says."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from scripts.docs_site.drawings import Drawing
from scripts.docs_site.families import PAGES, list_known
from scripts.docs_site.reference import pages

import miles.api.policy  # noqa: F401  the imports are not part of the first test's time
from miles.config.schema import get_options
from miles.launch.config import Config
from miles.launch.main import COMMANDS
from miles.models.accounting.known_models import load_known_models
from miles.models.families.registry import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def found() -> Mapping[str, str]:
    """Every generated file."""
    return pages()


def test_the_generated_pages_are_up_to_date(found: Mapping[str, str], regenerate: bool):
    if regenerate:
        for path, text in found.items():
            (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
            (DOCS / path).write_text(text, encoding="utf-8")
    stale = [path for path, text in found.items() if (DOCS / path).read_text(encoding="utf-8") != text]
    assert not stale, "run make regenerate"
    folders = [DOCS / name for name in ("families", "reference", "drawings")]
    checked_in = {str(file.relative_to(DOCS)) for folder in folders for file in folder.iterdir()}
    assert checked_in == found.keys() - {"platforms.md"}


def test_every_flag_and_command_is_on_its_page(found: Mapping[str, str]):
    flags, commands = found["reference/flags.md"], found["reference/cli.md"]
    assert not [option.flag for option in get_options(Config).values() if f"| `{option.flag}" not in flags]
    assert not [name for name in COMMANDS if f"## miles {name}\n" not in commands]


def test_every_family_and_every_published_model_is_on_one_page():
    on_pages = [family for page in PAGES for family in page.families]
    assert sorted(on_pages) == sorted(family.model_type for family in FAMILIES)
    models = [name for page in PAGES for name in list_known(page)]
    assert sorted(models) == sorted(load_known_models())


def test_a_text_that_does_not_fit_its_box_is_an_error():
    with pytest.raises(AssertionError, match="does not fit"):
        Drawing(100, 100, "").box(0, 0, 40, 20, "#000", "a title that is too long")
