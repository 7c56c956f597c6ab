"""``miles bundle``: an archive of what a bug report about a run needs, with secrets removed.

It holds the config, the logs, the metrics and the versions of packages. Prompts and responses (rollouts) and weights
stay out unless rollouts are asked for.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from miles import __version__
from miles.core.errors import UsageError
from miles.launch.config import BundleOptions
from miles.launch.plan.hardware import count_cores, get_free_memory, get_torch_build, list_accelerators
from miles.launch.plan.memory import format_bytes

_TEXT_FILES = ("config.toml", "metrics.jsonl", "timings.jsonl", "events.jsonl", "pins.json")
_TEXT_FOLDERS = ("logs", "eval")
_REDACTED = "[removed]"
_SECRET_NAME = re.compile(r"(token|secret|password|passwd|api_?key|credential|authorization)", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"(?P<keep>(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"  # an Authorization header
    r"|(?P<user>://)[^/\s:@]+:[^/\s@]+(?=@)"  # a password in a URL
    r"|\b(?:sk|hf|ghp|gho|github_pat|xox[abp]|glpat|wandb_v1)[-_][A-Za-z0-9_-]{10,}"  # keys of well-known services
    r"|\bAKIA[0-9A-Z]{16}\b",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    r"(?P<name>[\"']?[\w-]*(?:token|secret|password|passwd|api_?key|credential)[\w-]*[\"']?\s*[:=]\s*)"
    r"(?P<quote>[\"']?)(?P<value>[^\s\"',}]{6,})",
    re.IGNORECASE,
)
_MIN_SECRET_LENGTH = 6


def bundle(run: Path, options: BundleOptions) -> int:
    """Write the archive and print what is in it."""
    target = Path(options.output) if options.output else Path(f"{run.resolve().name}-bundle.tar.gz")
    if target.exists():
        raise UsageError(f"{target} exists already; name another file with --output.")
    secrets = list_secrets(os.environ)
    try:
        with tarfile.open(target, "x:gz") as archive:
            for name, content in _collect(run, options, secrets):
                info = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
                print(f"  {format_bytes(len(content)).rjust(10)}  {name}")
    except OSError as error:
        target.unlink(missing_ok=True)
        raise UsageError(
            f"{target} cannot be written: {error.strerror or error}; name another with --output."
        ) from error
    left_out = "" if options.rollouts else " Prompts and responses are left out (--rollouts adds them)."
    print(f"{target} holds {format_bytes(target.stat().st_size)}. Secrets were removed; read it before you send it.")
    print(f"Weights are left out.{left_out}")
    return 0


def list_secrets(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of environment variables whose name says that they are secret, longest first."""
    found = {value for name, value in environ.items() if _SECRET_NAME.search(name) and len(value) >= _MIN_SECRET_LENGTH}
    return tuple(sorted(found, key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Remove secrets: given values, headers, passwords in URLs, keys of known services, and ``name=value`` pairs.

    >>> redact("Authorization: Bearer abcdefghijkl, http://me:pw123456@host")
    'Authorization: Bearer [removed], http://[removed]@host'
    """
    for secret in secrets:
        text = text.replace(secret, _REDACTED)
    text = _SECRET_TEXT.sub(lambda found: f"{found['keep'] or found['user'] or ''}{_REDACTED}", text)
    return _ASSIGNMENT.sub(_redact_assignment, text)


def _redact_assignment(found: re.Match[str]) -> str:
    # An option such as --judge-token-env names a variable, and num_tokens is a count: neither is a secret.
    name = found["name"].strip("\"' :=").lower()
    if name.endswith(("_env", "-env")) or "tokens" in name or "tokenizer" in name or found["value"] == _REDACTED:
        return found[0]
    if found["value"].lower() in ("bearer", "basic", "false", "true", "null"):
        return found[0]
    return f"{found['name']}{found['quote']}{_REDACTED}"


def _collect(run: Path, options: BundleOptions, secrets: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    yield "environment.json", redact(json.dumps(_describe_environment(), indent=2), secrets).encode()
    yield "files.txt", "".join(f"{size:>14}  {name}\n" for name, size in _list_files(run)).encode()
    folders = [path for folder in _TEXT_FOLDERS for path in sorted((run / folder).rglob("*")) if path.is_file()]
    for path in (*(run / name for name in _TEXT_FILES), *folders):
        if path.is_file():
            yield str(path.relative_to(run)), _read_text(path, options.max_file_bytes, secrets)
    if options.rollouts:
        for path in sorted((run / "rollouts").glob("*.parquet")):
            yield str(path.relative_to(run)), path.read_bytes()


def _read_text(path: Path, limit: int, secrets: tuple[str, ...]) -> bytes:
    """The end of a text file, without secrets; the beginning is cut at a line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - limit))
        content = file.read(limit)
    if size > limit:
        content = f"[{size - limit} earlier bytes left out]\n".encode() + content.partition(b"\n")[2]
    return redact(content.decode("utf-8", "replace"), secrets).encode()


def _list_files(run: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(run.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(run)), path.stat().st_size


def _describe_environment() -> Mapping[str, object]:
    visible = ("CUDA_", "NCCL_", "TORCH", "PYTORCH", "HIP_", "ROCR_", "RAY_", "MILES_", "OMP_", "SGLANG", "TRITON_")
    return {
        "miles": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "cores": count_cores(),
        "free_memory": get_free_memory(),
        "accelerators": list_accelerators(),
        "torch_build": get_torch_build(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(visible)},
        "packages": dict(sorted((found.metadata["Name"], found.version) for found in distributions())),
    }
