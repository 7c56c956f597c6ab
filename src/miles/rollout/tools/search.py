"""Search over documents in memory: Okapi BM25 with an inverted index, built once and shared by all attempts.

A document's score for a query is the sum over the query's words w of

    ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) * f_w (k1 + 1) / (f_w + k1 (1 - b + b * length / mean length))

with N documents, n_w of them with the word, f_w times in this one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.errors import UsageError
from miles.rollout.tools.tool import Tool, cut

_WORD = re.compile(r"\w+")
_MOST_RESULTS = 20
_SHOWN = 1000  # characters of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What can be found."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A document and how well it fits."""

    document: Document
    score: float


def words(text: str) -> list[str]:
    """What is matched: runs of letters and digits, case aside."""
    return _WORD.findall(text.casefold())


class Index:
    """The words of documents, and where they are. Titles count as text."""

    def __init__(self, documents: Iterable[Document], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.documents: tuple[Document, ...] = tuple(documents)
        self._k1 = k1
        found: dict[str, tuple[list[int], list[int]]] = {}
        lengths: list[int] = []
        for number, document in enumerate(self.documents):
            counts = Counter(words(f"{document.title} {document.text}"))
            lengths.append(counts.total())
            for word, count in counts.items():
                where, often = found.setdefault(word, ([], []))
                where.append(number)
                often.append(count)
        self._found: dict[str, tuple[NDArray[np.int32], NDArray[np.float64]]] = {
            word: (np.array(where, np.int32), np.array(often, np.float64)) for word, (where, often) in found.items()
        }
        length = np.array(lengths, np.float64)
        mean = float(length.mean()) if len(length) and length.any() else 1.0
        self._weight: NDArray[np.float64] = k1 * (1 - b + b * length / mean)

    def search(self, query: str, count: int = 5) -> list[Hit]:
        """The best documents that have any of the query's words, best first; of equals the earlier."""
        scores = np.zeros(len(self.documents))
        for word, times in Counter(words(query)).items():
            if word in self._found:
                where, often = self._found[word]
                rarity = np.log1p((len(scores) - len(where) + 0.5) / (len(where) + 0.5))
                scores[where] += times * rarity * often * (self._k1 + 1) / (often + self._weight[where])
        best = np.argsort(-scores, kind="stable")[:count]
        return [Hit(document=self.documents[i], score=float(scores[i])) for i in best if scores[i] > 0]


def read_documents(path: str | Path) -> list[Document]:
    """Rows of JSONL with ``text`` (or ``contents``), and perhaps ``id`` (else the row's number) and ``title``."""
    documents: list[Document] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"The documents {path} cannot be read ({error.strerror}); name a JSONL file.") from error
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number + 1}, is not JSON ({error}); give one object a line.") from error
        text = row.get("text", row.get("contents")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UsageError(f"{path}, line {number + 1}, has no text; give every object a text (or contents).")
        documents.append(Document(id=str(row.get("id", number)), title=str(row.get("title", "")), text=text))
    return documents


def search(index: Index, *, count: int = 3) -> Tool:
    """The tool ``search``, which gives ``count`` results unless the model asks for another number."""

    async def call(arguments: Mapping[str, Any]) -> str:
        wanted = min(max(1, arguments.get("count", count)), _MOST_RESULTS)
        return _told(index.search(arguments["query"], wanted))

    return Tool(
        name="search",
        description="Search the document collection and return the passages that fit best.",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for, in keywords."},
                "count": {"type": "integer", "description": f"How many passages to return; {count} when absent."},
            },
            "required": ["query"],
        },
        call=call,
    )


def _told(hits: Sequence[Hit]) -> str:
    if not hits:
        return "Nothing was found."
    heads = [f"[{n}] {hit.document.title or hit.document.id}" for n, hit in enumerate(hits, 1)]
    bodies = [cut(hit.document.text, _SHOWN) for hit in hits]
    return "\n\n".join(f"{head}\n{body}" for head, body in zip(heads, bodies, strict=True))
