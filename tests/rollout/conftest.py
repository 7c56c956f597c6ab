"""The tokenizer every rollout test may share; it is never written to."""

import pytest
from tests.rollout.tiny import save_tokenizer

from miles.models.tokenizer import HfTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
