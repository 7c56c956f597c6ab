"""What the router counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles.cluster.route.engine import Engine, State
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.forward import Forwarder

CONTENT_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

_OF_AN_ENGINE: tuple[tuple[str, str, str, Callable[[Engine], float]], ...] = (
    ("requests_total", "counter", "Requests an engine was given.", lambda engine: engine.requests),
    ("failures_total", "counter", "Requests and probes that went wrong on an engine.", lambda engine: engine.failures),
    ("retried_total", "counter", "Requests of an engine that were tried again.", lambda engine: engine.retried),
    ("request_seconds_total", "counter", "Time requests spent at an engine.", lambda engine: engine.seconds),
    ("outstanding", "gauge", "Requests at an engine now.", lambda engine: engine.outstanding),
    ("work", "gauge", "Tokens those ask for, by estimate.", lambda engine: engine.work),
)


def metrics_text(fleet: Fleet, forwarder: Forwarder) -> str:
    """All of it, as text."""
    return "\n".join(_lines(fleet, forwarder)) + "\n"


def _lines(fleet: Fleet, forwarder: Forwarder) -> Iterator[str]:
    engines = list(fleet.engines.values())
    for name, kind, told, value in _OF_AN_ENGINE:
        yield from _head(f"engine_{name}", kind, told)
        for engine in engines:
            yield f'miles_route_engine_{name}{{engine="{_escaped(engine.id)}"}} {value(engine):g}'
    yield from _head("engine_state", "gauge", "1 for the state an engine is in, else 0.")
    for engine in engines:
        for state in State:
            labels = f'engine="{_escaped(engine.id)}",state="{state.value}"'
            yield f"miles_route_engine_state{{{labels}}} {int(engine.state is state)}"
    for name, kind, told, number in (
        ("waiting", "gauge", "Requests that wait in the router.", len(fleet.waiting)),
        ("refused_total", "counter", "Requests refused for want of an engine.", fleet.refused),
        ("retries_total", "counter", "Times a request was tried again.", forwarder.retries),
    ):
        yield from _head(name, kind, told)
        yield f"miles_route_{name} {number}"


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP miles_route_{name} {told}"
    yield f"# TYPE miles_route_{name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
