"""Convert rows of SWE-bench's format to prompts: ``python -m miles.rollout.data.swebench ROWS OUT.jsonl``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.core.errors import DataError
from miles.rollout.data.paths import read_rows

_KEPT = ("instance_id", "repo", "version", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_OPTIONAL = ("log_parser", "eval_type")


def convert_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A prompt with the issue as its ``prompt``, and what the environment ``swebench`` needs as its ``metadata``.

    The reference patch and the hints are left out: no part of a run needs them.
    """
    if missing := [key for key in ("problem_statement", *_KEPT) if key != "version" and key not in row]:
        raise DataError(f"{where} has no {missing[0]}, which every row of SWE-bench's format has.")
    metadata = {key: row[key] for key in (*_KEPT, *_OPTIONAL) if row.get(key) is not None}
    return {"prompt": row["problem_statement"], "metadata": metadata}


def convert_file(source: str, target: Path) -> int:
    """Convert all rows of a path as ``--prompt-data`` takes it; returns their number."""
    count = 0
    with target.open("w", encoding="utf-8") as file:
        for row in read_rows(source):
            file.write(json.dumps(convert_row(row.columns, row.where), ensure_ascii=False) + "\n")
            count += 1
    return count


def main() -> None:
    """Convert the rows of the first argument to the file of the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", help="JSONL, Parquet or Arrow files of SWE-bench's format, as --prompt-data takes them")
    parser.add_argument("out", type=Path, help="the JSONL file to write")
    arguments = parser.parse_args()
    convert_file(arguments.rows, arguments.out)


if __name__ == "__main__":
    main()
