"""Prometheus metrics: what the engine counts, read when asked, and how requests went, noted as they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from miles.backends.native.server.reply import Reply
from miles.core.errors import UsageError

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_COUNTED = {
    "steps": "Steps the engine has made.",
    "prefilled_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that were found computed.",
    "generated_tokens": "Tokens that were drawn.",
    "preemptions": "Requests that had to give their pages up and wait.",
}
_MEASURED = {
    "running": "Requests that are being computed.",
    "waiting": "Requests that wait.",
    "pages": "Pages of the key-value cache.",
    "free_pages": "Pages that hold nothing of a request under way.",
}


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, model: str) -> None:
        try:
            import prometheus_client as prometheus
            from prometheus_client import core
        except ImportError as error:
            raise UsageError("The server needs prometheus-client: pip install 'miles-rl[serve]'.") from error
        self._prometheus: Any = prometheus
        self._registry = prometheus.CollectorRegistry()
        self._engine = _Engine(core, model)
        self._registry.register(self._engine)
        common: dict[str, Any] = {"namespace": "miles_server", "registry": self._registry}
        self._requests = prometheus.Counter(
            "requests", "Requests by endpoint and status.", ("path", "status"), **common
        )
        self._finished = prometheus.Counter("answers", "Answers by why they ended.", ("reason",), **common)
        self._first = prometheus.Histogram(
            "first_token_seconds", "From a streamed request to its first token.", buckets=_SECONDS, **common
        )
        self._whole = prometheus.Histogram(
            "answer_seconds", "From a request to the end of its answer.", buckets=_SECONDS, **common
        )
        self._prompt = prometheus.Histogram("prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS, **common)
        self._written = prometheus.Histogram("answer_tokens", "Tokens of an answer.", buckets=_TOKENS, **common)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def answers(self, replies: Iterable[Reply]) -> None:
        """Answers that are done with, whether they came to an end or their client left."""
        for reply in replies:
            finish = reply.finish
            self._finished.labels("gone" if finish is None else finish.kind).inc()
            self._prompt.observe(len(reply.prompt))
            self._written.observe(len(reply.tokens))
            if reply.first is not None:
                self._first.observe(reply.first - reply.started)
            if reply.ended is not None:
                self._whole.observe(reply.ended - reply.started)

    def text(self, engine: Mapping[str, float]) -> bytes:
        """All of it; ``engine`` is what the engine says of itself now."""
        self._engine.numbers = engine
        return self._prometheus.generate_latest(self._registry)


class _Engine:
    """A collector of what the engine said last."""

    def __init__(self, core: Any, model: str) -> None:
        self.numbers: Mapping[str, float] = {}
        self._core = core
        self._model = model

    def collect(self) -> Iterator[Any]:
        kinds = ((_COUNTED, self._core.CounterMetricFamily), (_MEASURED, self._core.GaugeMetricFamily))
        for table, kind in kinds:
            for name, told in table.items():
                family = kind(f"miles_engine_{name}", told, labels=("model_name",))
                family.add_metric((self._model,), self.numbers.get(name, 0.0))
                yield family
