"""The tokenizer the server tests share: bytes, ChatML's marks as tokens of their own, a template with tools."""

import json

import pytest
from tests.rollout.session.server.live_session_server import TEMPLATE
from tests.server_api.tiny import _tokenizer

from miles.models.tokenizer import HfTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    folder = tmp_path_factory.mktemp("chatml")
    fast = _tokenizer()
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())
    return load_tokenizer(folder)
