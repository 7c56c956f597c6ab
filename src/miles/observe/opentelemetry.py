"""OpenTelemetry export: the spans of ``trace/`` and every metric, by OTLP over HTTP to --otlp-endpoint.

Spans are read from the trace files as they grow, so that what is exported is what the run recorded: one OpenTelemetry
trace for each step, whose phases (``rollout 12``, ``train 12``) are the parents of the spans inside them. Headers of
the requests, such as a key, are those of the environment variable OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from miles.core.errors import MilesError
from miles.observe.tracker_records import TrackerRecord

_TIMEOUT = 10.0
_MAX_SPANS = 1000
"""Spans of one request."""
_TAIL = 4096
"""Bytes before the end of a trace of an earlier process in which its last record ends."""
_PHASE = re.compile(r"(rollout|train|publish|evaluate) (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A complete event of a Chrome trace, in nanoseconds since the epoch."""

    name: str
    start: int
    end: int
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The step of a phase, None for other spans."""
        found = _PHASE.fullmatch(self.name)
        return None if found is None else int(found[2])


class TraceReader:
    """Reads complete events (``"ph": "X"``) that were appended to ``folder/*.json`` and end after ``since`` seconds."""

    def __init__(self, folder: Path, *, since: float) -> None:
        self._folder = folder
        self._since = since * 1e9
        self._offsets = {path: max(0, path.stat().st_size - _TAIL) for path in self._list_files()}
        self._names: dict[tuple[Path, Any, Any], str] = {}

    def read(self) -> list[TraceSpan]:
        """Return the spans that are new since the last call."""
        return [span for path in self._list_files() for span in self._read_file(path)]

    def _list_files(self) -> list[Path]:
        """Return the trace files; ``*.old.json`` are those that a full one was renamed to, and were read before."""
        return sorted(path for path in self._folder.glob("*.json") if not path.name.endswith(".old.json"))

    def _read_file(self, path: Path) -> Iterator[TraceSpan]:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            offset = self._offsets.get(path, 0)
            file.seek(offset if offset <= size else 0)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path] = file.tell() - len(data) + end
        for line in data[:end].splitlines():
            record = _parse_line(line)
            key = (path, record.get("pid"), record.get("tid"))
            if record.get("ph") == "M" and record.get("name") == "thread_name":
                self._names[key] = str(record["args"]["name"])
            elif record.get("ph") == "X" and (record["ts"] + record["dur"]) * 1000 >= self._since:
                track = {"thread.name": self._names[key]} if key in self._names else {}
                category = {"category": record["cat"]} if "cat" in record else {}
                attributes = {"trace.file": path.name, **track, **category, **_flatten(record.get("args", {}))}
                start = round(record["ts"] * 1000)
                yield TraceSpan(
                    name=record["name"], start=start, end=start + round(record["dur"] * 1000), attributes=attributes
                )


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the record of a line, empty for brackets and for the rest of a record that began earlier."""
    try:
        record = json.loads(line.strip().rstrip(b",") or b"{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str | bool | int | float) else str(value) for name, value in values.items()
    }


class OtlpExporter:
    """Exports to an OTLP receiver; ``clock`` reads seconds since the epoch.

    ``run_id`` tells runs apart: it is the attribute ``service.instance.id`` and part of the trace ids.
    """

    name = "opentelemetry"

    def __init__(self, endpoint: str, *, run_id: str, trace: Path, clock: Callable[[], float]) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._run_id = run_id
        self._clock = clock
        self._reader = TraceReader(trace, since=clock())
        self._pending: list[TraceSpan] = []
        self._session = str(clock())

    def open(self) -> str:
        """Build the exporters; they connect with each request."""
        logger = logging.getLogger(
            "opentelemetry"
        )  # the package logs each retry; failures are reported by their caller
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        http = "opentelemetry.exporter.otlp.proto.http"
        spans: Any = import_module(f"{http}.trace_exporter")
        metrics: Any = import_module(f"{http}.metric_exporter")
        self._resources: Any = import_module("opentelemetry.sdk.resources")
        self._trace_api: Any = import_module("opentelemetry.trace")
        self._trace_sdk: Any = import_module("opentelemetry.sdk.trace")
        self._metrics_sdk: Any = import_module("opentelemetry.sdk.metrics.export")
        self._scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("miles")
        attributes = {"service.name": "miles", "service.instance.id": self._run_id}
        self._resource = self._resources.Resource.create(attributes)
        self._span_exporter = spans.OTLPSpanExporter(endpoint=f"{self._endpoint}/v1/traces", timeout=_TIMEOUT)
        self._metric_exporter = metrics.OTLPMetricExporter(endpoint=f"{self._endpoint}/v1/metrics", timeout=_TIMEOUT)
        return f"OpenTelemetry: {self._endpoint}"

    def log(self, record: TrackerRecord) -> None:
        """Export the metrics of a record, and the spans that the run has written since."""
        if record.scalars:
            data = self._build_metrics({**record.scalars, "step": float(record.step)})
            self._require_success(self._metric_exporter.export(data, timeout_millis=_TIMEOUT * 1000))
        self._export_spans()

    def close(self) -> None:
        """Export the last spans."""
        self._export_spans()
        self._span_exporter.shutdown()
        self._metric_exporter.shutdown()

    def kill(self) -> None:
        """Do nothing: every request has a timeout."""

    def _export_spans(self) -> None:
        """Export spans, and keep those that were not accepted for the next time."""
        self._pending += self._reader.read()
        while self._pending:
            part = self._pending[:_MAX_SPANS]
            self._require_success(self._span_exporter.export(self._build_spans(part)))
            del self._pending[: len(part)]

    def _require_success(self, result: Any) -> None:
        if result.name != "SUCCESS":
            raise MilesError(f"{self._endpoint} did not accept the export; check --otlp-endpoint and the receiver")

    # -- OpenTelemetry's own types

    def _build_metrics(self, values: Mapping[str, float]) -> Any:
        sdk, now = self._metrics_sdk, round(self._clock() * 1e9)
        metrics = [
            sdk.Metric(
                name=f"miles.{name.replace('/', '.')}",
                description="",
                unit="s" if name.startswith("seconds/") else "",
                data=sdk.Gauge([sdk.NumberDataPoint({}, now, now, value)]),
            )
            for name, value in values.items()
        ]
        scope = sdk.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        resource = sdk.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return sdk.MetricsData(resource_metrics=[resource])

    def _build_spans(self, spans: Iterable[TraceSpan]) -> list[Any]:
        spans = list(spans)
        phases = [span for span in spans if span.step is not None]
        contexts = {id(span): self._build_context(span, span.step) for span in phases}
        built: list[Any] = []
        for span in spans:
            parent = find_phase(span, phases)
            context = contexts.get(id(span)) or self._build_context(span, None if parent is None else parent.step)
            built.append(
                self._trace_sdk.ReadableSpan(
                    name=span.name,
                    context=context,
                    parent=None if parent is None else contexts[id(parent)],
                    resource=self._resource,
                    attributes=dict(span.attributes),
                    start_time=span.start,
                    end_time=span.end,
                    instrumentation_scope=self._scope,
                )
            )
        return built

    def _build_context(self, span: TraceSpan, step: int | None) -> Any:
        """Build the ids of a span: the trace's from the run and the step, so that all spans of a step share it."""
        trace = f"{self._run_id}/{self._session}/{span.start if step is None else step}"
        text = f"{trace}/{span.name}/{span.start}/{span.end}/{json.dumps(dict(span.attributes), sort_keys=True)}"
        return self._trace_api.SpanContext(
            trace_id=int.from_bytes(hashlib.sha256(trace.encode()).digest()[:16], "big"),
            span_id=int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"),
            is_remote=False,
            trace_flags=self._trace_api.TraceFlags(self._trace_api.TraceFlags.SAMPLED),
        )


def find_phase(span: TraceSpan, phases: Iterable[TraceSpan]) -> TraceSpan | None:
    """Return the shortest phase that the middle of a span lies in; a phase has no parent."""
    if span.step is not None:
        return None
    middle = (span.start + span.end) // 2
    around = [phase for phase in phases if phase.start <= middle <= phase.end]
    return min(around, key=lambda phase: phase.end - phase.start, default=None)
