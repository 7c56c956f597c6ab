"""Prometheus metrics of the router, collected from the engine pool when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.proxy import RequestProxy

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_COUNTERS: tuple[tuple[str, str, Callable[[RoutedEngine], float]], ...] = (
    ("requests", "Requests sent to an engine.", lambda engine: engine.requests),
    ("failures", "Failed requests and health checks of an engine.", lambda engine: engine.failures),
    ("retried", "Requests of an engine that were retried elsewhere.", lambda engine: engine.retried),
    ("request_seconds", "Time requests spent at an engine.", lambda engine: engine.seconds),
)
_GAUGES: tuple[tuple[str, str, Callable[[RoutedEngine], float]], ...] = (
    ("outstanding", "Outstanding requests of an engine.", lambda engine: engine.outstanding),
    ("work", "Estimated tokens of the outstanding requests.", lambda engine: engine.load),
)


class RouterMetrics(Collector):
    """The metrics ``miles_route_*``."""

    def __init__(self, pool: RouterEnginePool, proxy: RequestProxy) -> None:
        self._pool = pool
        self._proxy = proxy
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engines = list(self._pool.engines.values())
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"miles_route_engine_{name}", text, labels=["engine"])
            for engine in engines:
                counter.add_metric([engine.name], value(engine))
            yield counter
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"miles_route_engine_{name}", text, labels=["engine"])
            for engine in engines:
                gauge.add_metric([engine.name], value(engine))
            yield gauge
        states = GaugeMetricFamily(
            "miles_route_engine_state", "1 for the state of an engine, else 0.", labels=["engine", "state"]
        )
        for engine in engines:
            for state in EngineState:
                states.add_metric([engine.name, state.value], float(engine.state is state))
        yield states
        yield GaugeMetricFamily("miles_route_waiting", "Requests waiting in the router.", len(self._pool.waiting))
        yield CounterMetricFamily(
            "miles_route_refused", "Requests rejected because no engine was free.", self._pool.refused
        )
        yield CounterMetricFamily("miles_route_retries", "Retries of requests.", self._proxy.retries)
