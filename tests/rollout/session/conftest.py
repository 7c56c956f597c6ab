"""A tokenizer for each family, trained once."""

from collections.abc import Callable

import pytest
from tests.rollout.session.cases import CASES, save_tokenizer

from miles.models.tokenizer import HfTokenizer


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HfTokenizer]:
    made: dict[str, HfTokenizer] = {}

    def of(name: str) -> HfTokenizer:
        if name not in made:
            case = CASES[name]
            made[name] = save_tokenizer(tmp_path_factory.mktemp("family"), case.template, case.marks, case.end)
        return made[name]

    return of
