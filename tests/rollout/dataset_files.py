"""Data as others write it: Arrow files, and folders laid out exactly as ``datasets`` 5.2 saves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from miles.core.types import Prompt
from miles.rollout.data.dataset import Dataset
from miles.rollout.data.mixture import PART_ID_STRIDE, MixturePart


def write_arrow(file: Path, rows: Sequence[Mapping[str, Any]] | pa.Table, *, stream: bool = True, batch: int = 1000):
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


def write_parts(folder: Path, rows: Sequence[Mapping[str, Any]] | pa.Table, *, shards: int = 1) -> Path:
    """What ``Dataset.save_to_disk(folder, num_shards=shards)`` leaves behind."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    kinds = {field.name: {"dtype": str(field.type), "_type": "Value"} for field in table.schema}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    share, more = divmod(table.num_rows, shards)
    first = 0
    for i, name in enumerate(names):
        size = share + (i < more)
        write_arrow(folder / name, table.slice(first, size), batch=2)
        first += size
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "76c3e78cdfaefac0",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": kinds, "homepage": "", "license": ""}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    return folder


def write_splits(folder: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """What ``DatasetDict.save_to_disk`` leaves behind."""
    for name, rows in splits.items():
        write_parts(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def part(name: str, size: int, number: int = 0, weight: Any = None) -> MixturePart:
    """A part of ``size`` prompts, the ``number``-th of its mixture."""
    prompts = tuple(
        Prompt(id=number * PART_ID_STRIDE + i, messages=({"role": "user", "content": f"{name} {i}"},))
        for i in range(size)
    )
    return MixturePart(name=name, dataset=Dataset(path=f"{name}.jsonl", prompts=prompts), weight=weight)
