"""A word-level tokenizer for small models: a token for each letter and each piece of text that a template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles.models.checkpoint.safetensors_io import write_json


def write_tokenizer(
    folder: Path,
    vocabulary: Mapping[str, int],
    *,
    pieces: Sequence[str],
    special: Sequence[str],
    unknown: str = "?",
    **settings: str,
) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``; what no token stands for is read as ``unknown``.

    ``pieces`` are the tokens of several letters, ``special`` those of them that are no text; ``settings`` are entries
    of the second file, such as ``chat_template``.
    """
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": vocabulary[piece], "content": piece, **whole, "special": piece in special} for piece in pieces]
    write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": dict(vocabulary), "unk_token": unknown},
        },
    )
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
