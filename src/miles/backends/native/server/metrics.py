"""Prometheus metrics: the engine's counters, read on request, and finished requests, observed as they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from miles.backends.native.server.output_state import OutputState
from miles.core.errors import UsageError

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_ENGINE_COUNTERS = {
    "steps": "Steps of the engine.",
    "prefilled_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Sampled tokens.",
    "preemptions": "Requests that lost their pages and were queued again.",
    "state_hits": "Requests that began with a cached recurrent state.",
    "saved_states": "Recurrent states of prefixes that were kept.",
    "encoded_images": "Images that the vision tower encoded.",
    "speculative_steps": "Steps that verified drafted tokens.",
    "draft_chains": "Verifications: drafts of one request in one step.",
    "drafted_tokens": "Drafted tokens that were verified.",
    "accepted_draft_tokens": "Drafted tokens that were accepted.",
    "draft_branches": "Branches that verifications had besides their chain.",
    "accepted_draft_branches": "Verifications that accepted a branch.",
}
_ENGINE_GAUGES = {
    "running": "Running requests.",
    "waiting": "Waiting requests.",
    "pages": "Pages of the KV cache.",
    "free_pages": "Pages that no running request uses.",
}


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        try:
            import prometheus_client as prometheus
            from prometheus_client import core
        except ImportError as error:
            raise UsageError("The server needs prometheus-client: pip install 'miles-rl[serve]'.") from error
        self._prometheus: Any = prometheus
        self._registry = prometheus.CollectorRegistry()
        self._engine = _EngineCollector(core, model)
        self._registry.register(self._engine)
        common: dict[str, Any] = {"namespace": "miles_server", "registry": self._registry}
        self._requests = prometheus.Counter(
            "requests", "Requests by endpoint and status.", ("path", "status"), **common
        )
        self._finish_reasons = prometheus.Counter("answers", "Completions by finish reason.", ("reason",), **common)
        self._first_token = prometheus.Histogram(
            "first_token_seconds", "From a streamed request to its first token.", buckets=_SECONDS, **common
        )
        self._latency = prometheus.Histogram(
            "answer_seconds", "From a request to the end of its completion.", buckets=_SECONDS, **common
        )
        self._prompt_tokens = prometheus.Histogram("prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS, **common)
        self._output_tokens = prometheus.Histogram(
            "answer_tokens", "Tokens of a completion.", buckets=_TOKENS, **common
        )

    def count_request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def observe_outputs(self, states: Iterable[OutputState]) -> None:
        """Requests that are over, whether they ended or their client disconnected."""
        for state in states:
            reason = state.finish_reason
            self._finish_reasons.labels("gone" if reason is None else reason.kind).inc()
            self._prompt_tokens.observe(len(state.prompt))
            self._output_tokens.observe(len(state.tokens))
            if state.first_token_time is not None:
                self._first_token.observe(state.first_token_time - state.start_time)
            if state.end_time is not None:
                self._latency.observe(state.end_time - state.start_time)

    def render(self, engine: Mapping[str, float]) -> bytes:
        """All metrics as text; ``engine`` are the engine's current values."""
        self._engine.values = engine
        return self._prometheus.generate_latest(self._registry)


class _EngineCollector:
    """A Prometheus collector of the engine's last values."""

    def __init__(self, core: Any, model: str) -> None:
        self.values: Mapping[str, float] = {}
        self._core = core
        self._model = model

    def collect(self) -> Iterator[Any]:
        kinds = ((_ENGINE_COUNTERS, self._core.CounterMetricFamily), (_ENGINE_GAUGES, self._core.GaugeMetricFamily))
        for descriptions, family_type in kinds:
            for name, description in descriptions.items():
                family = family_type(f"miles_engine_{name}", description, labels=("model_name",))
                family.add_metric((self._model,), self.values.get(name, 0.0))
                yield family
