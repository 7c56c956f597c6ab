"""Search tool over documents in memory: Okapi BM25 with an inverted index, built once and shared by all trajectories.

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
from miles.rollout.tools.tool import Tool, truncate_middle

_WORD = re.compile(r"\w+")
_MAX_RESULTS = 20
_RESULT_CHARS = 1000  # characters of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A searchable document."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A document and its BM25 score."""

    document: Document
    score: float


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words of letters and digits."""
    return _WORD.findall(text.casefold())


class BM25Index:
    """Inverted index with BM25 scoring. Titles count as text."""

    def __init__(self, documents: Iterable[Document], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.documents: tuple[Document, ...] = tuple(documents)
        self._k1 = k1
        postings: dict[str, tuple[list[int], list[int]]] = {}
        lengths: list[int] = []
        for number, document in enumerate(self.documents):
            counts = Counter(tokenize(f"{document.title} {document.text}"))
            lengths.append(counts.total())
            for word, count in counts.items():
                rows, counts_per_row = postings.setdefault(word, ([], []))
                rows.append(number)
                counts_per_row.append(count)
        self._postings: dict[str, tuple[NDArray[np.int32], NDArray[np.float64]]] = {
            word: (np.array(rows, np.int32), np.array(counts_per_row, np.float64))
            for word, (rows, counts_per_row) in postings.items()
        }
        length = np.array(lengths, np.float64)
        mean = float(length.mean()) if len(length) and length.any() else 1.0
        self._length_norm: NDArray[np.float64] = k1 * (1 - b + b * length / mean)

    def search(self, query: str, count: int = 5) -> list[SearchHit]:
        """The best documents that contain any of the query's words, best first; ties keep their order."""
        scores = np.zeros(len(self.documents))
        for word, times in Counter(tokenize(query)).items():
            if word in self._postings:
                rows, counts_per_row = self._postings[word]
                rarity = np.log1p((len(scores) - len(rows) + 0.5) / (len(rows) + 0.5))
                scores[rows] += (
                    times * rarity * counts_per_row * (self._k1 + 1) / (counts_per_row + self._length_norm[rows])
                )
        best = np.argsort(-scores, kind="stable")[:count]
        return [SearchHit(document=self.documents[i], score=float(scores[i])) for i in best if scores[i] > 0]


def read_documents(path: str | Path) -> list[Document]:
    """Read JSONL rows with ``text`` (or ``contents``), and optionally ``id`` (default: row number) and ``title``."""
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


def build_search_tool(index: BM25Index, *, count: int = 3) -> Tool:
    """Build the tool ``search``, which returns ``count`` results unless the model asks for another number."""

    async def call(arguments: Mapping[str, Any]) -> str:
        num_results = min(max(1, arguments.get("count", count)), _MAX_RESULTS)
        return _format_hits(index.search(arguments["query"], num_results))

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


def _format_hits(hits: Sequence[SearchHit]) -> str:
    if not hits:
        return "Nothing was found."
    heads = [f"[{n}] {hit.document.title or hit.document.id}" for n, hit in enumerate(hits, 1)]
    bodies = [truncate_middle(hit.document.text, _RESULT_CHARS) for hit in hits]
    return "\n\n".join(f"{head}\n{body}" for head, body in zip(heads, bodies, strict=True))
