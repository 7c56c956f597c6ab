"""Prometheus endpoint of a run: the newest value of every metric as a gauge, at ``/metrics`` of --metrics-port.

Names are those of ``metrics.jsonl`` after ``miles_`` and a section, with other characters than letters, digits and
underscores replaced: ``eval/easy/pass@4`` is ``miles_eval_easy_pass_at_4``.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from miles.observe.metric import find_metric
from miles.observe.tracker_records import TrackerRecord

DEFAULT_PORT = 9090
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusEndpoint:
    """An HTTP server on a thread; every series has the label ``run_name``.

    With a ``token``, a request must send it as ``Authorization: Bearer``.
    """

    name = "prometheus"

    def __init__(self, host: str, port: int, *, run_name: str, token: str | None = None) -> None:
        self._host = host
        self._port = port
        self._run_name = run_name
        self._token = token
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        """The URL of the metrics, once open."""
        assert self._server is not None
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/metrics"

    def open(self) -> str:
        """Listen; OSError where the port is taken."""
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        collector: Any = self
        registry.register(collector)
        render = partial(prometheus_client.generate_latest, registry)
        handler = partial(_MetricsHandler, render, prometheus_client.CONTENT_TYPE_PLAIN_0_0_4, self._token)
        self._server = _MetricsServer((self._host, self._port), handler)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return f"Prometheus: {self.address}"

    def log(self, record: TrackerRecord) -> None:
        """Replace the values."""
        with self._lock:
            self._values |= {**record.scalars, "step": float(record.step)}

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def kill(self) -> None:
        """Do nothing: no call waits."""

    def collect(self) -> Iterator[Any]:
        """Yield a gauge for every metric; the registry of prometheus_client calls it."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = dict(self._values)
        by_name = {name_for_prometheus(name): name for name in sorted(values)}
        for exported, name in by_name.items():
            gauge = GaugeMetricFamily(exported, _describe(name), labels=["run_name"])
            gauge.add_metric([self._run_name], values[name])
            yield gauge


def name_for_prometheus(name: str) -> str:
    """Return a name that Prometheus accepts.

    >>> name_for_prometheus("eval/easy/pass@4")
    'miles_eval_easy_pass_at_4'
    """
    return f"miles_{_NOT_IN_NAMES.sub('_', name.replace('@', '_at_'))}"


def _describe(name: str) -> str:
    metric = find_metric(name) or find_metric(name.partition("/")[2])
    return name if metric is None else f"{name}: {metric.meaning}"


class _MetricsServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


class _MetricsHandler(BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    timeout = 10  # a client that sends nothing holds a thread for so many seconds

    def __init__(self, render: Any, content_type: str, token: str | None, *more: Any) -> None:
        self._render = render
        self._content_type = content_type
        self._token = token
        super().__init__(*more)

    def do_GET(self) -> None:
        """Answer with the text format of Prometheus."""
        sent = self.headers.get("Authorization", "")
        if self._token is not None and not secrets.compare_digest(sent.encode(), f"Bearer {self._token}".encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n", {"WWW-Authenticate": "Bearer"})
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"the metrics are at /metrics\n", {})
        else:
            self._answer(HTTPStatus.OK, self._render(), {"Content-Type": self._content_type})

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for a request."""

    def _answer(self, status: HTTPStatus, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in (
            {"Content-Type": "text/plain"} | dict(headers) | {"Content-Length": str(len(body))}
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
