"""Knobs of the router: where it listens, which engines it has, how it chooses, waits and tries again."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """One address for several engines."""

    engine_urls: tuple[str, ...] = knob(
        (),
        "The engines, as in http://127.0.0.1:30000; more can join while the router runs.",
        aliases=("--worker-urls",),
        unit="url",
    )
    host: str = knob("127.0.0.1", "The address to listen on; any but this machine's own needs a key.")
    port: int = knob(30100, "The port to listen on; 0 takes a free one.")
    policy: Literal["least_load", "prefix", "round_robin"] = knob(
        "least_load",
        "To the engine with the least work, to the one that holds the prompt's prefix, or to each in turn.",
        aliases=("--router-policy", "--sglang-router-policy"),
    )
    prefix_tokens: int = knob(
        256, "Leading prompt tokens that decide where a request without a routing key goes.", unit="tokens"
    )
    spill_factor: float = knob(
        1.25, "How many times the mean load an engine may have before prefix sends its keys on to the next one."
    )
    spill_floor: int = knob(
        32, "Outstanding requests below which prefix never sends an engine's keys elsewhere.", unit="requests"
    )
    max_retries: int = knob(
        2,
        "How often a request that has not been answered yet may be tried again.",
        aliases=("--retry-max-retries",),
        unit="times",
    )
    max_concurrent_requests: int = knob(
        8192, "Requests at the engines at once; others wait in the router.", unit="requests"
    )
    queue_size: int = knob(1024, "Requests that may wait in the router; one more is refused.", unit="requests")
    queue_timeout_secs: float = knob(
        60.0, "How long a request waits in the router for an engine before it is refused.", unit="seconds"
    )
    max_payload_size: int = knob(512 << 20, "The longest body a request may have.", unit="bytes")
    connect_timeout_secs: float = knob(5.0, "How long making a connection to an engine may take.", unit="seconds")
    first_byte_timeout_secs: float = knob(
        1800.0, "How long an engine may take to begin its reply; all of it, unless it streams.", unit="seconds"
    )
    request_timeout_secs: float = knob(
        3600.0, "How long a request may take in all, with every retry and the whole stream.", unit="seconds"
    )
    broadcast_timeout_secs: float = knob(
        600.0, "How long each engine may take over what is sent to all of them, such as weights.", unit="seconds"
    )
    drain_timeout_secs: float = knob(
        600.0, "How long the requests of an engine that leaves, or of the router, may take to end.", unit="seconds"
    )
    health_check_endpoint: str = knob(
        "/health", "What is asked of an engine to see that it is well; /health_generate has it generate."
    )
    health_check_interval_secs: float = knob(
        2.0,
        "Time between two such questions to an engine.",
        aliases=("--router-health-check-interval-secs",),
        unit="seconds",
    )
    health_check_timeout_secs: float = knob(
        30.0, "How long its answer may take.", aliases=("--router-health-check-timeout-secs",), unit="seconds"
    )
    health_failure_threshold: int = knob(
        3,
        "Failures in a row that put an engine into quarantine; a refused connection does so at once.",
        aliases=("--router-health-failure-threshold",),
        unit="times",
    )
    health_success_threshold: int = knob(
        2,
        "Successes in a row after which an engine back from quarantine is trusted with more than one request.",
        aliases=("--router-health-success-threshold",),
        unit="times",
    )
    quarantine_secs: float = knob(
        1.0, "How long the first quarantine lasts; each one that follows at once lasts twice as long.", unit="seconds"
    )
    max_quarantine_secs: float = knob(60.0, "How long a quarantine lasts at most.", unit="seconds")
    require_same_weights: bool = knob(
        True,
        "Keep an engine out that comes with another weight version than the engines which serve.",
        off="--no-require-same-weights",
    )
    api_key_file: str | None = knob(
        None,
        "A file that holds the key clients must send; without it the environment's MILES_API_KEY, if set.",
        path=True,
    )
    allow_unauthenticated: bool = knob(
        False, "Listen to other machines without a key: whoever reaches the port may ask."
    )
    engine_api_key_file: str | None = knob(
        None,
        "A file that holds the key of the engines; without it MILES_ENGINE_API_KEY, if set, or the router's own key.",
        path=True,
    )
