"""``miles parity``: which operation two backends first differ in, on the same tokens, and by how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from miles.backends.sglang import flags
from miles.cluster import platform
from miles.core.errors import UsageError
from miles.core.types import Tokens
from miles.kernels import arithmetic
from miles.launch.compared import as_text, compare
from miles.launch.config import ParityOptions
from miles.launch.found import newest_checkpoint, why_not_a_checkpoint
from miles.launch.sides import Model, side_of
from miles.models import hub
from miles.models.choice import chosen_spec
from miles.models.exactness import inexact
from miles.models.files import read_config
from miles.models.spec import DecoderSpec
from miles.models.tokenizer import load_tokenizer
from miles.observe.rollouts import read_step, step_path

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Beyond which a difference is not rounding, in what a program of that precision computes."""


def parity(model: str, options: ParityOptions) -> int:
    """Compare, print, and say by the exit code whether the two agree: 0 or 1."""
    given = Path(model)
    folder = newest_checkpoint(given) or given
    if why := why_not_a_checkpoint(folder):
        raise UsageError(f"{model} {why}")
    _refuse(options)
    sides = [side_of(name, sglang_python=options.sglang_python) for name in (options.a, options.b)]
    spec = chosen_spec(folder, "native")
    if options.parity == "exact" and (problem := inexact(spec)) is not None:
        raise UsageError(f"--parity exact cannot be had of this model: {problem}; leave it out.")
    where = platform.find(options.device)
    dtype = hub.choose_dtype(options.dtype, read_config(folder), where.device)
    what = Model(
        folder=folder,
        spec=spec,
        device=where.device,
        dtype=dtype,
        prefill_chunk=options.prefill_chunk,
        trusted=options.trust_remote_code,
        sglang_python=options.sglang_python,
        sglang_flags=options.sglang_flags,
    )
    other = what if options.other is None else replace(what, folder=_other(Path(options.other), spec))
    sequences = sequences_of(given, folder, spec, options)
    with arithmetic.using(options.parity):
        a, b = sides[0](what, sequences), sides[1](other, sequences)
    found = compare(a, b, layers=spec.num_layers)
    tolerance = None if options.exact else TOLERANCES[dtype] if options.tolerance is None else options.tolerance
    names = ("one", "the other") if options.a == options.b else (options.a, options.b)
    count = sum(map(len, sequences))
    print(f"{folder}: {options.a} against {options.b}, {count} tokens, {_plain(dtype)}, {where.device}\n")
    print(as_text(found, a=names[0], b=names[1], tolerance=tolerance))
    return 0 if found.first(tolerance) is None else 1


def _refuse(options: ParityOptions) -> None:
    """What two sides cannot be asked for together, each in a sentence."""
    sides = (options.a, options.b)
    wrong = list(flags.problems(options.sglang_flags))
    if options.other is not None and "://" in options.b:
        wrong.append("--other is a checkpoint that --b opens, and a server has its own; leave it out.")
    if options.parity == "exact" and "megatron" in sides:
        wrong.append("--parity exact cannot be had of megatron, whose operations are not all ours; leave it out.")
    elif options.parity == "exact" and not {"native", "fsdp"} & set(sides):
        wrong.append("--parity exact is the arithmetic of native and fsdp, and neither is compared; leave it out.")
    if (options.sglang_flags or options.sglang_python) and "sglang" not in sides:
        wrong.append("--sglang-python and flags of SGLang are for --a or --b sglang, and neither is; leave them out.")
    if wrong:
        raise UsageError(wrong)


def _other(given: Path, spec: DecoderSpec) -> Path:
    folder = newest_checkpoint(given) or given
    if why := why_not_a_checkpoint(folder):
        raise UsageError(f"--other {given} {why}")
    if chosen_spec(folder, "native") != spec:
        raise UsageError(f"--other {given} is a model of another shape, and cannot be held against this one.")
    return folder


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sequences_of(given: Path, folder: Path, spec: DecoderSpec, options: ParityOptions) -> list[Tokens]:
    """The tokens to read: of a run's trajectory, of a file, as told, or by chance."""
    asked = {"--step": options.step is not None, "--prompt-file": options.prompt_file is not None}
    asked["--tokens"] = bool(options.tokens)
    if sum(asked.values()) > 1:
        told = " and ".join(flag for flag, there in asked.items() if there)
        raise UsageError(f"{told} each say which tokens are read; keep one of them.")
    if options.step is not None:
        found = _trajectory(given, options.step, options.sample or 0)
    elif options.sample is not None:
        raise UsageError("--sample is a trajectory of a step; say which step with --step.")
    elif options.prompt_file is not None:
        found = _read(Path(options.prompt_file), folder, options)
    elif options.tokens:
        found = list(options.tokens)
    else:
        rng = np.random.default_rng(options.seed)
        sizes = [options.length, max(2, options.length // 3), max(2, options.length // 2)]
        return [rng.integers(0, spec.vocab_size, min(n, spec.max_positions)).astype(np.int32) for n in sizes]
    if len(found) < 2:
        raise UsageError(f"{len(found)} tokens are too few to compare: the second is the first that is predicted.")
    if max(found) >= spec.vocab_size or min(found) < 0:
        raise UsageError(f"token {max(found)} is not of this model, whose vocabulary has {spec.vocab_size}.")
    return [np.array(found[: spec.max_positions], np.int32)]


def _trajectory(run: Path, step: int, sample: int) -> list[int]:
    path = step_path(run / "rollouts", step)
    if not path.is_file():
        raise UsageError(f"{path} is not there; --step is of a run that saved its rollouts, whose folder is named.")
    rows = read_step(path)
    if sample >= len(rows):
        raise UsageError(f"--sample {sample} is not in step {step} of {run}, which has {len(rows)}, counted from 0.")
    return [int(token) for token in rows[sample]["tokens"]]


def _read(path: Path, folder: Path, options: ParityOptions) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {path} cannot be read: {error}.") from error
    return load_tokenizer(folder, options.trust_remote_code).encode(text)
