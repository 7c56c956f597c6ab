"""Hugging Face hub names: ids of models and datasets, revisions, splits and ``hf://`` URIs. No network, no files.

| text | names |
|---|---|
| ``ORG/NAME[@REVISION]``, ``hf://NAME[@REVISION]``, ``hf://ORG/NAME[@REVISION]`` | a model |
| ``ORG/NAME[:CONFIG][@SPLIT[@REVISION]]`` | a split of a dataset |
| ``hf://datasets/ORG/NAME[@REVISION][/PATH]`` | files of a dataset, or the split ``train`` without a path |
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from typing import Literal

from miles.core.errors import UsageError

HubKind = Literal["model", "dataset"]
DEFAULT_SPLIT = "train"

_REPO = r"(?P<repo>(?P<owner>[A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*)"
_REVISION = r"(?P<revision>[\w./-]+)"
_MODEL = re.compile(rf"{_REPO}(?:@{_REVISION})?")
_MODEL_URI = re.compile(rf"hf://(?:models/)?(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@{_REVISION})?")
_DATASET = re.compile(rf"{_REPO}(?::(?P<subset>[\w.-]+))?(?:@(?P<split>[\w.-]+)(?:@{_REVISION})?)?")
_DATASET_URI = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>refs/\w+/\w+|[\w.-]+))?(?:/(?P<files>.+))?"
)
_ENTRY_TAIL = re.compile(r"(?P<name>.+?)(?P<tail>(?:@\[[^\[\]]*\])?(?:\*[-+\d.eE]+)?)", re.DOTALL)
_DATA_SUFFIXES = (".jsonl", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model, or rows of a dataset, on the Hugging Face hub; without a revision, its main branch."""

    kind: HubKind
    repo: str
    revision: str | None = None
    subset: str | None = None
    split: str | None = None
    files: str | None = None

    def __str__(self) -> str:
        """The name with all it was given; it parses back to itself."""
        if self.kind == "dataset" and self.files is None:
            subset = f":{self.subset}" if self.subset else ""
            revision = f"@{self.revision}" if self.revision else ""
            return f"{self.repo}{subset}@{self.split or DEFAULT_SPLIT}{revision}"
        prefix = "hf://datasets/" if self.kind == "dataset" else "hf://"
        return (
            prefix + self.repo + (f"@{self.revision}" if self.revision else "") + (f"/{self.files}" * bool(self.files))
        )


def parse_hub_name(kind: HubKind, text: str, folder: str = "") -> HubName | None:
    """The model or dataset that ``text`` names; None for a path, which ``folder`` may hold.

    A path that exists is a path, and so is one whose first folder exists; ``hf://`` always names the hub.

    >>> parse_hub_name("model", "Qwen/Qwen3-0.6B").repo
    'Qwen/Qwen3-0.6B'
    >>> str(parse_hub_name("dataset", "openai/gsm8k:main@test"))
    'openai/gsm8k:main@test'
    >>> parse_hub_name("model", "/models/Qwen3") is None
    True
    """
    if text.startswith("hf://"):
        return _parse_uri(kind, text)
    found = (_MODEL if kind == "model" else _DATASET).fullmatch(text)
    if found is None or text.endswith(_DATA_SUFFIXES):
        return None
    if os.path.exists(os.path.join(folder, text)) or os.path.isdir(os.path.join(folder, found["owner"])):
        return None
    given = {key: value for key, value in found.groupdict().items() if key != "owner"}
    return HubName(kind=kind, **given)


def split_entry(text: str) -> tuple[str, str]:
    """A data entry without its slice and weight, and those.

    >>> split_entry("openai/gsm8k@train@[:100]*0.5")
    ('openai/gsm8k@train', '@[:100]*0.5')
    """
    found = _ENTRY_TAIL.fullmatch(text)
    return (text, "") if found is None else (found["name"], found["tail"])


def is_path(kind: HubKind, text: str, folder: str = "") -> bool:
    """Whether ``text`` is a path, not a URL or a name on the hub."""
    name = split_entry(text)[0] if kind == "dataset" else text
    if "://" in name:
        return False
    return parse_hub_name(kind, name, folder) is None


def _parse_uri(kind: HubKind, text: str) -> HubName:
    is_dataset = text.startswith("hf://datasets/")
    if is_dataset != (kind == "dataset"):
        wanted = "hf://datasets/ORG/NAME" if kind == "dataset" else "hf://ORG/NAME"
        raise UsageError(f"{text} does not name a {kind}; write {wanted}.")
    found = (_DATASET_URI if is_dataset else _MODEL_URI).fullmatch(text)
    if found is None:
        raise UsageError(f"{text} is not a name on the hub; write {text[: text.index('//') + 2]}ORG/NAME@REVISION.")
    return HubName(kind=kind, **found.groupdict())
