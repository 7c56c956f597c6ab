"""``miles parity``: find the first operation in which two backends differ on the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from miles.backends.remote import sglang_flags
from miles.cluster import platform
from miles.core.errors import UsageError
from miles.core.types import Tokens
from miles.kernels.numerics import configure_cublas, numerics_from_parity
from miles.launch.config import ParityOptions
from miles.launch.parity.backend import ParityModel
from miles.launch.parity.backends import get_backend
from miles.launch.parity.diff import as_text, compare
from miles.launch.rules.paths import find_checkpoint_problem, find_newest_checkpoint
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.resolve import resolve_spec
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import load_tokenizer
from miles.observe.rollouts import read_step, step_path

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences above which it is not rounding, by dtype."""


def parity(model: str, options: ParityOptions) -> int:
    """Compare and print; 0 if the backends agree, else 1."""
    path = Path(model)
    folder = find_newest_checkpoint(path) or path
    if problem := find_checkpoint_problem(folder):
        raise UsageError(f"{model} {problem}")
    _check_options(options)
    backends = [get_backend(name, sglang_python=options.sglang_python) for name in (options.a, options.b)]
    spec = resolve_spec(folder, "native")
    if options.parity == "exact" and (problem := check_batch_invariance(spec)) is not None:
        raise UsageError(f"--parity exact does not work with this model: {problem}; remove it.")
    found = platform.detect_platform(options.device)
    dtype = hf.choose_dtype(options.dtype, read_config(folder), found.device)
    numerics = numerics_from_parity(options.parity)
    configure_cublas(numerics)
    parity_model = ParityModel(
        folder=folder,
        spec=spec,
        device=found.device,
        dtype=dtype,
        numerics=numerics,
        prefill_chunk=options.prefill_chunk,
        trust_remote_code=options.trust_remote_code,
        sglang_python=options.sglang_python,
        sglang_flags=options.sglang_flags,
    )
    other = parity_model
    if options.other is not None:
        other = replace(parity_model, folder=_resolve_other(Path(options.other), spec))
    sequences = _build_sequences(path, folder, spec, options)
    a, b = backends[0](parity_model, sequences), backends[1](other, sequences)
    diff = compare(a, b, layers=spec.num_layers)
    tolerance = None if options.exact else TOLERANCES[dtype] if options.tolerance is None else options.tolerance
    names = ("one", "the other") if options.a == options.b else (options.a, options.b)
    count = sum(map(len, sequences))
    print(
        f"{folder}: {options.a} and {options.b}, {count} tokens, {str(dtype).removeprefix('torch.')}, {found.device}\n"
    )
    print(as_text(diff, a=names[0], b=names[1], tolerance=tolerance))
    return 0 if diff.first(tolerance) is None else 1


def _check_options(options: ParityOptions) -> None:
    """Refuse options that do not fit together."""
    names = (options.a, options.b)
    problems = list(sglang_flags.find_flag_problems(options.sglang_flags))
    if options.other is not None and "://" in options.b:
        problems.append("--other is a checkpoint for --b to load, but --b is a server; remove it.")
    if options.parity == "exact" and not {"native", "fsdp", "megatron"} & set(names):
        problems.append("--parity exact is for native, fsdp and megatron, of which none is compared; remove it.")
    if (options.sglang_flags or options.sglang_python) and "sglang" not in names:
        problems.append("--sglang-python and flags of SGLang need --a sglang or --b sglang; add that, or remove them.")
    if problems:
        raise UsageError(problems)


def _resolve_other(path: Path, spec: DecoderSpec) -> Path:
    folder = find_newest_checkpoint(path) or path
    if problem := find_checkpoint_problem(folder):
        raise UsageError(f"--other {path} {problem}")
    if resolve_spec(folder, "native") != spec:
        raise UsageError(f"--other {path} is a model of another shape; name one of the same shape.")
    return folder


def _build_sequences(model: Path, folder: Path, spec: DecoderSpec, options: ParityOptions) -> list[Tokens]:
    """The sequences to run: a trajectory of a run, a file, given tokens, or random ones."""
    sources = {"--step": options.step is not None, "--prompt-file": options.prompt_file is not None}
    sources["--tokens"] = bool(options.tokens)
    if sum(sources.values()) > 1:
        flags = " and ".join(flag for flag, is_set in sources.items() if is_set)
        raise UsageError(f"{flags} each set the tokens; keep one of them.")
    if options.step is not None:
        tokens = _read_trajectory(model, options.step, options.sample or 0)
    elif options.sample is not None:
        raise UsageError("--sample needs --step; add that, or remove --sample.")
    elif options.prompt_file is not None:
        tokens = _read_prompt_file(Path(options.prompt_file), folder, options)
    elif options.tokens:
        tokens = list(options.tokens)
    else:
        rng = np.random.default_rng(options.seed)
        sizes = [options.length, max(2, options.length // 3), max(2, options.length // 2)]
        return [rng.integers(0, spec.vocab_size, min(n, spec.max_positions)).astype(np.int32) for n in sizes]
    if len(tokens) < 2:
        raise UsageError(f"{len(tokens)} tokens are too few: give at least two, since the first is not predicted.")
    if max(tokens) >= spec.vocab_size or min(tokens) < 0:
        raise UsageError(f"token {max(tokens)} is outside the vocabulary of {spec.vocab_size} tokens.")
    return [np.array(tokens[: spec.max_positions], np.int32)]


def _read_trajectory(run: Path, step: int, sample: int) -> list[int]:
    path = step_path(run / "rollouts", step)
    if not path.is_file():
        raise UsageError(f"{path} does not exist; --step needs the folder of a run that saved its rollouts.")
    rows = read_step(path)
    if sample >= len(rows):
        raise UsageError(
            f"--sample {sample} does not exist: step {step} of {run} has {len(rows)} trajectories, counted from 0."
        )
    return [int(token) for token in rows[sample]["tokens"]]


def _read_prompt_file(path: Path, folder: Path, options: ParityOptions) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {path} cannot be read: {error}.") from error
    return load_tokenizer(folder, options.trust_remote_code).encode(text)
