"""Fingerprints of a run's inputs (weights, tokenizer, chat template, graders), compared when the run is resumed.

A fingerprint is fast: large files are sampled. It notices files that were replaced, not an adversary.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from miles import __version__
from miles.core.errors import ResumeError, describe_error
from miles.launch.config import Config
from miles.launch.hub.resolve import describe_name
from miles.launch.plan.lora import get_adapter_folder
from miles.launch.plan.plan import Plan, build_plan
from miles.launch.policies.config import get_policies
from miles.launch.runtime.run_directory import write_atomically
from miles.models.checkpoint.safetensors_io import TOKENIZER_FILES

FILE = "inputs.json"
_GRADERS = "graders"
_PACKAGES = ("sympy", "latex2sympy2_extended", "reasoning-gym")

Fingerprints = dict[str, dict[str, str]]
"""A digest of every file, by what the run uses the file for."""

_WHOLE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 12
_NUM_BLOCKS = 64


def check_inputs(run_dir: Path, config: Config, plan: Plan, *, newest: Path | None) -> list[str]:
    """Write the fingerprints of a new run, or compare those of one that resumes from ``newest``; returns notes.

    ResumeError if weights, tokenizer or chat template differ. Graders may have been corrected: they are a note.
    """
    path = run_dir / FILE
    current = fingerprint_inputs(config, plan)
    notes: list[str] = []
    if newest is not None and path.exists():
        stored = _read_fingerprints(path)
        for role in sorted(stored.keys() & current.keys() - {_GRADERS}):
            if (file := _find_difference(stored[role], current[role])) is not None:
                raise ResumeError(
                    f"the {role} of {run_dir} is not what the run was started with: {file} has changed; restore it, or "
                    f"start a new run from the weights of this one with --hf-checkpoint {newest} --save NEW"
                )
        if (grader := _find_difference(stored.get(_GRADERS, {}), current[_GRADERS])) is not None:
            notes.append(f"The graders are not those this run was started with: {grader} has changed.")
    write_atomically(path, json.dumps(current, indent=1, sort_keys=True))
    return notes


def fingerprint_inputs(config: Config, plan: Plan) -> Fingerprints:
    """The fingerprints of everything that a resumed run reads again, besides its prompts."""
    found: Fingerprints = {}
    policies = get_policies(config)
    for index, policy in enumerate(policies):
        if not policy.owns_weights:
            continue
        own = plan if index == 0 else build_plan(policy.config)
        prefix = "" if len(policies) == 1 else f"{policy.name} "
        for role, files in _list_files(policy.config, own):
            found[prefix + role] = {_describe_file(file): _fingerprint_file(file) for file in files}
    return {**found, _GRADERS: _fingerprint_graders(config)}


def _list_files(config: Config, plan: Plan) -> Iterator[tuple[str, list[Path]]]:
    assert config.models.hf_checkpoint is not None
    base = Path(config.models.hf_checkpoint)
    yield "tokenizer or config", [base / name for name in ("config.json", "tekken.json", *TOKENIZER_FILES)]
    if config.lora.is_enabled:
        yield "base model", _list_weights(base)
    if (adapter := get_adapter_folder(config.lora)) is not None:
        yield "adapter to start from", _list_weights(adapter)
    if plan.reference is not None:
        yield "reference model", _list_weights(plan.reference)
    if plan.critic is not None:
        yield "critic to start from", _list_weights(plan.critic)
    for name, folder in plan.teachers.items():
        yield f"teacher {name}", _list_weights(folder)


def _describe_file(file: Path) -> str:
    """A file of the hub's cache by its name and revision, which are the same on another machine; others by path."""
    return f"{describe_name(os.path.abspath(file.parent))}/{file.name}"


def _list_weights(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    return sorted(path for path in files if not path.name.startswith("optimizer"))


def _fingerprint_file(path: Path) -> str:
    """A digest of the size and the content: all of a small file, of a large one its start, its end and blocks."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_WHOLE_BYTES))  # the header of safetensors is within
        if size > _WHOLE_BYTES:
            for number in range(1, _NUM_BLOCKS + 1):
                file.seek((size - _BLOCK_BYTES) * number // _NUM_BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def _fingerprint_graders(config: Config) -> dict[str, str]:
    path = config.rollout.custom_rm_path
    if path is None:
        return {"miles": __version__, **{name: found for name in _PACKAGES if (found := _get_version(name))}}
    module = path.rpartition(":" if ":" in path else ".")[0]
    if module.endswith(".py"):
        return {module: _fingerprint_file(Path(module))}
    try:
        spec = find_spec(module)
    except Exception:  # of the user's package; loading the function reports it
        return {}
    return {} if spec is None or spec.origin is None else {spec.origin: _fingerprint_file(Path(spec.origin))}


def _get_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _find_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    return next((name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)), None)


def _read_fingerprints(path: Path) -> Fingerprints:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {str(role): {str(k): str(v) for k, v in files.items()} for role, files in stored.items()}
    except (ValueError, AttributeError) as error:
        raise ResumeError(
            f"{path} is damaged ({describe_error(error)}); remove it to resume without comparing the inputs"
        ) from error
