"""Options of the router: address, engines, routing policy, queue, timeouts, retries and health checks."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of ``miles route``."""

    engine_urls: tuple[str, ...] = option(
        (),
        "URLs of the engines, for example http://127.0.0.1:30000; more can be added while the router runs.",
        aliases=("--worker-urls",),
        unit="url",
    )
    host: str = option("127.0.0.1", "Address to listen on; any other than loopback needs an API key.")
    port: int = option(30100, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    policy: Literal["least_load", "prefix", "round_robin"] = option(
        "least_load",
        "Routing policy: the engine with the least load, the one with the prompt's prefix cached, or each in turn.",
        aliases=("--router-policy", "--sglang-router-policy"),
    )
    prefix_tokens: int = option(
        256, "Leading prompt tokens that are hashed as the routing key of a request without one.", unit="tokens", ge=1
    )
    spill_factor: float = option(
        1.25, "Multiple of the mean load above which the prefix policy sends an engine's keys to the next engine.", ge=1
    )
    spill_floor: int = option(
        32,
        "Outstanding requests below which the prefix policy never sends an engine's keys elsewhere.",
        unit="requests",
        ge=1,
    )
    max_retries: int = option(
        2,
        "Retries of a request on other engines, before the first byte of a response.",
        aliases=("--retry-max-retries",),
        unit="times",
        ge=0,
    )
    max_concurrent_requests: int = option(
        8192, "Concurrent requests at the engines; others wait in the router.", unit="requests", ge=1
    )
    queue_size: int = option(
        1024, "Requests that may wait in the router; further ones are rejected.", unit="requests", ge=0
    )
    queue_timeout_secs: float = option(
        60.0, "How long a request waits in the router for an engine before it is rejected.", unit="seconds", ge=0
    )
    max_payload_size: int = option(512 << 20, "Maximum size of a request body.", unit="bytes", ge=1)
    connect_timeout_secs: float = option(5.0, "Timeout for opening a connection to an engine.", unit="seconds", gt=0)
    first_byte_timeout_secs: float = option(
        1800.0, "Timeout for the first byte of a response; for all of it, unless it streams.", unit="seconds", gt=0
    )
    request_timeout_secs: float = option(
        3600.0, "Timeout of a whole request, including retries and the stream.", unit="seconds", gt=0
    )
    broadcast_timeout_secs: float = option(
        600.0, "Timeout of a broadcast at each engine, such as a weight update.", unit="seconds", gt=0
    )
    drain_timeout_secs: float = option(
        600.0,
        "How long the requests of an engine that is removed, or of the router at its end, may take to finish.",
        unit="seconds",
        ge=0,
    )
    health_check_endpoint: str = option(
        "/health", "Health check endpoint of the engines; /health_generate samples a token."
    )
    health_check_interval_secs: float = option(
        2.0,
        "Time between two health checks of an engine.",
        aliases=("--router-health-check-interval-secs",),
        unit="seconds",
        gt=0,
    )
    health_check_timeout_secs: float = option(
        30.0, "Timeout of a health check.", aliases=("--router-health-check-timeout-secs",), unit="seconds", gt=0
    )
    health_failure_threshold: int = option(
        3,
        "Consecutive failures that put an engine into quarantine; a failed connection does so at once.",
        aliases=("--router-health-failure-threshold",),
        unit="times",
        ge=1,
    )
    health_success_threshold: int = option(
        2,
        "Consecutive successes after which an engine back from quarantine gets more than one request at a time.",
        aliases=("--router-health-success-threshold",),
        unit="times",
        ge=1,
    )
    quarantine_secs: float = option(
        1.0,
        "Duration of the first quarantine; each further one without recovery lasts twice as long.",
        unit="seconds",
        gt=0,
    )
    max_quarantine_secs: float = option(60.0, "Maximum duration of a quarantine.", unit="seconds", gt=0)
    require_same_weights: bool = option(
        True,
        "Keep an engine out of service whose weight version differs from that of the serving engines.",
        off="--no-require-same-weights",
    )
    api_key_file: str | None = option(
        None,
        "File with the API key that clients must send; if unset, the environment variable MILES_API_KEY.",
        path=True,
    )
    allow_unauthenticated: bool = option(False, "Accept requests from other machines without an API key.")
    engine_api_key_file: str | None = option(
        None,
        "File with the API key of the engines; if unset, MILES_ENGINE_API_KEY, or else the router's own key.",
        path=True,
    )
