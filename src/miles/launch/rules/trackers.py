"""Rules of experiment trackers: which flags belong together, packages, and secrets that are not in flags."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import parse_qs, urlsplit

from miles.launch.config import Config
from miles.launch.rules.flags import FlagsNeed, Rule
from miles.observe.config import METRICS_TOKEN
from miles.rollout.serving.http import is_loopback

TRACKER_FLAG_RULES: tuple[Rule, ...] = (
    FlagsNeed(
        ("--tb-dir", "--tb-project-name", "--tb-experiment-name"),
        "--use-tensorboard",
        lambda c: c.observe.use_tensorboard,
    ),
    FlagsNeed(("--tb-experiment-name",), "--tb-project-name", lambda c: c.observe.tb_project_name is not None),
    FlagsNeed(
        (
            "--wandb-project",
            "--wandb-group",
            "--wandb-team",
            "--wandb-host",
            "--wandb-mode",
            "--wandb-dir",
            "--wandb-run-id",
            "--wandb-random-suffix",
            "--wandb-always-use-train-step",
            "--wandb-key",
        ),
        "--use-wandb",
        lambda c: c.observe.use_wandb,
    ),
    FlagsNeed(
        ("--mlflow-tracking-uri", "--mlflow-experiment-name", "--mlflow-run-name", "--mlflow-run-id"),
        "--use-mlflow",
        lambda c: c.observe.use_mlflow,
    ),
    FlagsNeed(
        (
            "--trackio-project",
            "--trackio-run-name",
            "--trackio-dir",
            "--trackio-server-url",
            "--trackio-space-id",
        ),
        "--use-trackio",
        lambda c: c.observe.use_trackio,
    ),
    FlagsNeed(("--metrics-host", "--prometheus-run-name"), "--metrics-port", lambda c: _uses_prometheus(c)),
    FlagsNeed(("--tracker-samples-interval",), "--tracker-samples", lambda c: c.observe.tracker_samples > 0),
)


def _uses_prometheus(c: Config) -> bool:
    return c.observe.use_prometheus or c.observe.metrics_port is not None


def check_tracker_urls(c: Config) -> Iterator[str]:
    """A URL is written to the run directory and to the tracker itself, so it may hold no password and no token."""
    o = c.observe
    urls = {
        "--wandb-host": (o.wandb_host, "WANDB_API_KEY"),
        "--mlflow-tracking-uri": (o.mlflow_tracking_uri, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        "--trackio-server-url": (o.trackio_server_url, "TRACKIO_WRITE_TOKEN"),
        "--otlp-endpoint": (o.otlp_endpoint, "OTEL_EXPORTER_OTLP_HEADERS"),
    }
    for flag, (url, variable) in urls.items():
        if url is not None and _has_secret(url):
            yield f"{flag} has a password or a token in its URL, which would be written down; set {variable} instead."
    if o.otlp_endpoint is not None and urlsplit(o.otlp_endpoint).scheme not in ("http", "https"):
        yield f"--otlp-endpoint {o.otlp_endpoint} is not an HTTP URL; write http://host:4318."


def _has_secret(url: str) -> bool:
    parts = urlsplit(url)
    return parts.password is not None or any("token" in name or "key" in name for name in parse_qs(parts.query))


def check_metrics_token(c: Config) -> Iterator[str]:
    host = c.observe.metrics_host
    if _uses_prometheus(c) and not is_loopback(host) and not os.environ.get(METRICS_TOKEN):
        yield (
            f"--metrics-host {host} is open to other machines, but there is no token: set {METRICS_TOKEN}, which "
            "Prometheus sends as its bearer token."
        )


def check_tracker_packages(c: Config) -> Iterator[str]:
    o = c.observe
    wanted = {
        "--use-tensorboard": (o.use_tensorboard, "tensorboard", "tensorboard"),
        "--use-wandb": (o.use_wandb, "wandb", "wandb"),
        "--use-mlflow": (o.use_mlflow, "mlflow", "mlflow"),
        "--use-trackio": (o.use_trackio, "trackio", "trackio"),
        "--metrics-port": (_uses_prometheus(c), "prometheus_client", "prometheus"),
        "--otlp-endpoint": (o.otlp_endpoint is not None, "opentelemetry.exporter.otlp.proto.http", "opentelemetry"),
    }
    for flag, (is_used, module, extra) in wanted.items():
        if is_used and not _is_installed(module):
            yield f"{flag} needs the package {module}: pip install 'miles-rl[{extra}]'."


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


TRACKER_RULES: tuple[Rule, ...] = (*TRACKER_FLAG_RULES, check_tracker_urls)
TRACKER_MACHINE_RULES: tuple[Rule, ...] = (check_tracker_packages, check_metrics_token)
