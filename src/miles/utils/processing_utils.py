"""Upstream's loading of tokenizers and processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.models.tokenizer import load_tokenizer as load_hf_tokenizer


def load_tokenizer(
    name_or_path: str, chat_template_path: str | None = None, trust_remote_code: bool = False, **_: Any
) -> Any:
    """The transformers tokenizer of a checkpoint."""
    tokenizer = load_hf_tokenizer(name_or_path, trust_remote_code).inner
    if chat_template_path is not None:
        tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def load_processor(name_or_path: str, **_: Any) -> None:
    """None: models here read text, so there is no processor."""
