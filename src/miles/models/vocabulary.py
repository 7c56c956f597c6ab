"""Which vocabulary a checkpoint's tokens are of, as a short word that two checkpoints can be compared by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def vocabulary_of(folder: Path) -> str | None:
    """A digest of every token and its id, however the files are laid out; None where no such file is known.

    Without a ``tokenizer.json`` it is that of the file that is there.
    """
    whole = folder / "tokenizer.json"
    if whole.is_file():
        known = sorted(_tokens(json.loads(whole.read_text(encoding="utf-8"))).items())
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    found = next((folder / name for name in _OTHERS if (folder / name).is_file()), None)
    return None if found is None else hashlib.sha256(found.read_bytes()).hexdigest()[:16]


def _tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    words = tokenizer["model"].get("vocab", {})
    known = dict(words) if isinstance(words, dict) else {word: number for number, (word, *_) in enumerate(words)}
    return known | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
