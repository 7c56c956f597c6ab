"""A tokenizer for each family, trained once."""

from collections.abc import Callable

import pytest
from tests.rollout.session.cases import CASES, save_tokenizer

from miles.models.tokenizer import HubTokenizer


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HubTokenizer]:
    made: dict[str, HubTokenizer] = {}

    def of(name: str) -> HubTokenizer:
        if name not in made:
            case = CASES[name]
            made[name] = save_tokenizer(tmp_path_factory.mktemp("family"), case.template, case.marks, case.end)
        return made[name]

    return of
