"""TensorBoard tracker: event files with all scalars and tables of samples; needs only the tensorboard package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from miles.observe.tracker_records import SAMPLE_COLUMNS, TrackerRecord


class TensorBoard:
    """Writes ``train/``, ``eval/``, ``seconds/`` and ``speculative/`` scalars, and samples as a text table.

    A resumed run hides the points it repeats.
    ``clock`` gives seconds since the epoch, which TensorBoard shows beside the step.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, *, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._writer: Any = None

    def open(self) -> str:
        """Create the event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # generated modules: their message classes exist only at run time
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        return f"TensorBoard: tensorboard --logdir {self._folder}"

    def log(self, record: TrackerRecord) -> None:
        """Write a record, and return when it is in the file."""
        if record.is_resume:
            self._void_after(record.step)
        kind = self._summaries.Summary
        values = [kind.Value(tag=tag, simple_value=value) for tag, value in sorted(record.scalars.items())]
        if record.samples:
            values.append(self._build_text("samples", format_table(SAMPLE_COLUMNS, record.samples)))
        if values:
            self._add(record.step, summary=kind(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def kill(self) -> None:
        """Do nothing: every record is in the file when ``log`` returns."""

    def _build_text(self, tag: str, text: str) -> Any:
        """Build a value of TensorBoard's text plugin, which shows Markdown."""
        tensors: Any = import_module("tensorboard.compat.proto.tensor_pb2")
        types: Any = import_module("tensorboard.compat.proto.types_pb2")
        shapes: Any = import_module("tensorboard.compat.proto.tensor_shape_pb2")
        plugin: Any = import_module("tensorboard.plugins.text.metadata")
        shape = shapes.TensorShapeProto(dim=[shapes.TensorShapeProto.Dim(size=1)])
        tensor = tensors.TensorProto(dtype=types.DT_STRING, tensor_shape=shape, string_val=[text.encode()])
        metadata = plugin.create_summary_metadata(display_name=tag, description="")
        return self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)

    def _void_after(self, step: int) -> None:
        """Mark what a previous process wrote beyond ``step`` as void."""
        kind = self._events.SessionLog
        self._add(step + 1, session_log=kind(status=kind.START))

    def _add(self, step: int, **payload: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=self._clock(), step=step, **payload))


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; text of a model is shown as code, so that it is not read as Markdown.

    >>> format_table(["reward", "text"], [(0.5, "a|b")]).splitlines()[2]
    '| 0.5 | `a\\\\|b` |'
    """
    lines = [columns, ["---"] * len(columns), *([_format_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_cell(value: Any) -> str:
    if not isinstance(value, str):
        return "" if value is None else str(value)
    text = value.replace("`", "'").replace("|", "\\|").replace("\r", "").replace("\n", " ⏎ ")
    return f"`{text}`" if text else ""
