"""BM25 as the formula has it, and documents as files have them."""

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import UsageError
from miles.rollout.tools.search import BM25Index, Document, build_search_tool, read_documents, tokenize

WORDS = st.sampled_from(["red", "Green", "blue", "a", "the", "Zürich", "42"])
TEXTS = st.lists(WORDS, max_size=12).map(" ".join)


def formula(query: str, texts: list[str], at: int, k1: float = 1.2, b: float = 0.75) -> float:
    """Straight from the head of the file, document by document."""
    split = [tokenize(text) for text in texts]
    mean = sum(map(len, split)) / len(split) or 1.0
    total = 0.0
    for word in tokenize(query):
        having = sum(word in each for each in split)
        often = split[at].count(word)
        rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        total += rarity * often * (k1 + 1) / (often + k1 * (1 - b + b * len(split[at]) / mean))
    return total


@given(st.lists(TEXTS, min_size=1, max_size=8), TEXTS)
def test_scores_are_those_of_the_formula_and_best_comes_first(texts, query):
    index = BM25Index(Document(id=str(i), title="", text=text) for i, text in enumerate(texts))
    hits = index.search(query, count=len(texts))
    wanted = {str(i): formula(query, texts, i) for i in range(len(texts))}
    assert {hit.document.id: hit.score for hit in hits} == pytest.approx({i: s for i, s in wanted.items() if s > 0})
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_the_tool_shows_titles_and_texts_and_says_when_there_are_none(tmp_path):
    rows = [
        {"id": "a", "title": "Bern", "text": "The capital of Switzerland."},
        {"contents": "Paris is the capital of France."},
        {"id": 3, "text": "Bananas are berries."},
    ]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    documents = read_documents(path)
    assert [document.id for document in documents] == ["a", "1", "3"]
    tool = build_search_tool(BM25Index(documents))
    found = asyncio.run(tool.call({"query": "capital of SWITZERLAND?", "count": 1}))
    assert found == "[1] Bern\nThe capital of Switzerland."
    assert asyncio.run(tool.call({"query": "quantum"})) == "Nothing was found."


@pytest.mark.parametrize(("line", "complaint"), [("{", "line 1, is not JSON"), ('{"id": 1}', "line 1, has no text")])
def test_documents_that_cannot_be_read_are_named(tmp_path, line, complaint):
    path = tmp_path / "documents.jsonl"
    path.write_text(line)
    with pytest.raises(UsageError, match=complaint):
        read_documents(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_documents(tmp_path / "absent.jsonl")
