"""Prometheus metrics of the training service: totals over all tenants, so that none learns of another."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from miles.backends.service.service import TrainingService

__all__ = ["ServiceMetrics", "collect_totals"]

_PREFIX = "miles_service_"


def collect_totals(service: TrainingService) -> dict[str, float]:
    """Return what the service has done and holds, over all tenants."""
    training, sampling = service.training.counts, service.sampling.counts
    state = service.store.state
    return {
        "passes": training.passes,
        "shared_passes": training.shared_passes,
        "pass_parts": training.parts,
        "trained_tokens": training.tokens,
        "updates": training.updates,
        "pass_seconds": training.seconds,
        "sampled_sequences": sampling.sequences,
        "sampled_tokens": sampling.tokens,
        "training_runs": sum(not run.unloaded for run in state.runs.values()),
        "checkpoints": len(state.checkpoints),
        "stored_bytes": sum(checkpoint.size for checkpoint in state.checkpoints.values()),
        "queued_training": len(service.training),
        "queued_sampling": len(service.sampling),
        "journal_bytes": service.store.journal.size,
    }


_GAUGES = {
    "training_runs": "Adapters in training.",
    "checkpoints": "Stored checkpoints.",
    "stored_bytes": "Size of all checkpoints.",
    "queued_training": "Parts of training requests that wait.",
    "queued_sampling": "Sampling requests that wait or run.",
    "journal_bytes": "Size of the journal.",
}
_COUNTERS = {
    "passes": "Passes of the trainer.",
    "shared_passes": "Passes with data of several tenants.",
    "pass_parts": "Parts of requests in all passes.",
    "trained_tokens": "Tokens of all passes.",
    "updates": "Optimizer steps.",
    "pass_seconds": "Time of all passes.",
    "sampled_sequences": "Sampled sequences.",
    "sampled_tokens": "Sampled tokens.",
}


class ServiceMetrics:
    """Counts requests by endpoint and status, and reads everything else from the service."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}requests", "HTTP requests by endpoint and status.", ["path", "status"], registry=self._registry
        )
        self._registry.register(self)  # pyright: ignore[reportArgumentType]

    def count_request(self, path: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the service, for the registry."""
        totals = collect_totals(self._service)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, totals[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, totals[name])

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
