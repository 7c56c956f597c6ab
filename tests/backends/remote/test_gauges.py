"""Gauges of servers are what they report of themselves, and nothing where they do not answer."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool
from miles.backends.remote.pool.health_monitor import HealthConfig
from miles.backends.remote.remote_engine import RemoteEngine
from miles.core.types import Version

ANSWERS = {
    "miles": {"internal_states": [{"running": 3.0, "waiting": 1.0, "pages": 8, "free_pages": 2, "resting": False}]},
    "sglang": {"internal_states": [{"last_gen_throughput": 120.5, "token_usage": 0.25, "memory_usage": {"kv": 1}}]},
    "foreign": ["no", "states"],
    "empty": {"internal_states": []},
}


class Server(BaseHTTPRequestHandler):
    """Answers with the state of the server whose name is the token."""

    def do_GET(self) -> None:
        name = self.headers["Authorization"].removeprefix("Bearer ")
        body = json.dumps(ANSWERS[name]).encode()
        self.send_response(200 if self.path == "/server_info" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_server_has_the_gauges_it_reports(address: str):
    async def build() -> RemoteEngine:
        names = [*ANSWERS, "gone"]
        pool = EnginePool(names, eos_token_ids=frozenset())
        for slot in pool.slots:
            url = address if slot.name != "gone" else "http://127.0.0.1:9"
            pool.mark_serving(slot, SglangClient(url, slot.name, token=slot.name, vocab_size=9), Version())
        pool.slots[1].outstanding = 5
        return RemoteEngine(pool, (), HealthConfig(interval=1.0, timeout=1.0, first_wait=1.0, max_restarts=0), print)

    engine = asyncio.run(build())
    assert engine.read_gauges() == {
        "miles": {"running": 3.0, "waiting": 1.0, "pages": 8.0, "free_pages": 2.0},
        "sglang": {"running": 5.0, "tokens_per_second": 120.5, "kv_used": 0.25},
        "foreign": {"running": 0.0},
        "empty": {"running": 0.0},
        "gone": {"running": 0.0},
    }
