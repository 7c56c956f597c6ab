"""Task suites as prompt data: ``reasoning_gym:TASK`` and ``lm_eval:TASK`` name prompts of a package, not files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles.core.errors import DataError
from miles.rollout.data import lm_eval, procedural
from miles.rollout.data.lm_eval import is_lm_eval, parse_lm_eval
from miles.rollout.data.procedural import is_procedural, parse_task


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRow:
    """One prompt of a suite: its text, its answer, and what its reward needs."""

    index: int
    text: str
    answer: Any
    metadata: dict[str, Any]


def is_suite(path: str) -> bool:
    """Whether a path names a task of a suite instead of a file."""
    return is_procedural(path) or is_lm_eval(path)


def get_task_name(path: str) -> str:
    """The name of the task."""
    return parse_lm_eval(path).name if is_lm_eval(path) else parse_task(path).name


def count_suite_rows(path: str) -> int:
    """The number of prompts of a task."""
    return len(lm_eval.list_entries(path)) if is_lm_eval(path) else parse_task(path).size


def find_suite_problem(path: str) -> str | None:
    """Why the prompts of a task cannot be had, in one sentence; None if they can."""
    if is_procedural(path):
        return procedural.find_task_problem(path)
    try:
        lm_eval.list_entries(path)
    except DataError as error:
        return str(error)
    return None


def read_suite_rows(path: str, rows: slice) -> Iterator[SuiteRow]:
    """The prompts of a task. Their metadata holds what the suite's own reward needs."""
    selected = range(count_suite_rows(path))[rows]
    if is_lm_eval(path):
        entries = lm_eval.list_entries(path)
        for index in selected:
            entry = entries[index]
            metadata = {"rm_type": lm_eval.SCHEME, lm_eval.ENTRY: {"path": path, "doc_id": entry["doc_id"]}}
            yield SuiteRow(index=index, text=entry["prompt"], answer=entry["target"], metadata=metadata)
        return
    task = parse_task(path)
    content = {"source_dataset": task.name} | ({} if task.rm_type is None else {"rm_type": task.rm_type})
    for index, entry in zip(selected, procedural.generate_entries(path, selected), strict=True):
        metadata = {**content, "entry": entry}
        yield SuiteRow(index=index, text=entry["question"], answer=entry["answer"], metadata=metadata)
