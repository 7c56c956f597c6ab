"""``miles doctor``: what this machine can run and what it is missing, with a verdict."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from miles.core.errors import MilesError, UsageError
from miles.kernels.numerics import FAST
from miles.launch.plan.hardware import count_cores, get_torch_build, list_accelerators
from miles.launch.plan.memory import format_bytes
from miles.launch.rules.paths import find_checkpoint_problem
from miles.models.accounting.params import (
    active_parameter_count,
    gradient_bytes,
    kv_bytes_per_token,
    optimizer_bytes,
    parameter_count,
    weight_bytes,
)
from miles.models.checkpoint.safetensors_io import StoredTensor, read_config, stored_tensors
from miles.models.checkpoint.tensor_sources import locate_tensors, read_quant_config
from miles.models.families import spec_from_config
from miles.models.families.diagnose import list_mechanisms
from miles.models.families.registry import match_family
from miles.models.resolve import is_known_to_transformers
from miles.models.spec import DecoderSpec

if TYPE_CHECKING:
    from miles.cluster.platform import Platform
    from miles.kernels.runtime.selftest import SelfTestResult

PYTHON = (3, 11)
REQUIRED: Mapping[str, str] = MappingProxyType(
    {
        "torch": "2.11",
        "numpy": "2.0",
        "safetensors": "0.6",
        "transformers": "5.0",
        "huggingface-hub": "1.33",
        "pyarrow": "18",
        "pyyaml": "6.0",
        "rich": "13.7",
        "matplotlib": "3.9",
        "pillow": "11",
    }
)
OPTIONAL: Mapping[str, str] = MappingProxyType(
    {
        "tensorboard": "curves in a browser, with --use-tensorboard",
        "wandb": "curves in Weights & Biases, with --use-wandb",
        "mlflow-skinny": "curves in MLflow, with --use-mlflow",
        "trackio": "curves in Trackio, with --use-trackio",
        "ray": "many machines, with --runtime ray",
        "sglang": "the SGLang engine, with --rollout-backend sglang",
        "megatron-core": "the Megatron trainer, with --train-backend megatron",
    }
)
DEMO_MEMORY = 1 << 30
DEMO_DISK = 1 << 28
_TRITON = "is compiled by Triton, and that is not installed: pip install triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. ``lacks`` says what keeps the demo (or the model) from running, if anything does."""

    name: str
    text: str
    lacks: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Matrix products a second, in 1e9 operations."""

    float32: float
    bfloat16: float

    @property
    def dtype(self) -> str:
        """The faster one; float32 when they are near, since it is the more exact."""
        return "bfloat16" if self.bfloat16 > 1.2 * self.float32 else "float32"


def doctor(model: Path | None, *, kernels: bool = False) -> int:
    """Print the report; 0 when the demo (and the model, if one is named) can run here, else 1.

    With ``kernels``, device code is tried, and must agree with torch.
    """
    if model is not None and (why := find_checkpoint_problem(model)):
        raise UsageError(f"{model} {why}")
    if kernels and (why := _why_no_kernels()):
        raise UsageError(f"--kernels {why}")
    findings = [_python(), *check_packages(), *_list_optional_packages()]
    for finding in findings:
        _print(finding)
    if not any(finding.lacks for finding in findings):
        for finding in _machine(model, kernels):
            findings.append(finding)
            _print(finding)
    lacks = [finding.lacks for finding in findings if finding.lacks]
    what = "the demo" if model is None else f"the demo, and train {model}"
    if not lacks:
        print(f"\nverdict: this machine can run {what}." + ("" if model else " Try: miles demo"))
        return 0
    print("\nverdict: not yet.")
    for lack in lacks:
        print(f"  - {lack}")
    return 1


def _print(finding: Finding) -> None:
    print(f"{'!' if finding.lacks else ' '} {finding.name.ljust(13)} {finding.text}", flush=True)


def _python() -> Finding:
    now = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, PYTHON))
    lacks = None if sys.version_info[:2] >= PYTHON else f"Python {wanted} or newer is needed, and this is {now}."
    return Finding(name="python", text=f"{now} ({sys.executable})", lacks=lacks)


def check_packages(needed: Sequence[str] = ()) -> Iterator[Finding]:
    """The required packages with their versions, and of the optional ones those that are ``needed``."""
    for name, least in REQUIRED.items():
        found = _version(name)
        if found is None:
            yield Finding(name=name, text="absent", lacks=f"{name} is not installed: pip install '{name}>={least}'.")
        else:
            lacks = f"{name} {found} is older than {least}: pip install '{name}>={least}'."
            text = f"{found}, built for {get_torch_build() or 'the CPU alone'}" if name == "torch" else found
            yield Finding(name=name, text=text, lacks=None if _numbers(found) >= _numbers(least) else lacks)
    for name in needed:
        found = _version(name)
        lacks = (
            None
            if found
            else f"{name} is not installed, and this run needs it for {OPTIONAL[name]}: pip install {name}."
        )
        yield Finding(name=name, text=found or "absent", lacks=lacks)


def _list_optional_packages() -> Iterator[Finding]:
    for name, gives in OPTIONAL.items():
        yield Finding(name=name, text=f"{_version(name) or 'absent'} (optional: {gives})")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:3])


def _machine(model: Path | None, kernels: bool) -> Iterator[Finding]:
    from miles.cluster import platform

    here = platform.detect_platform("auto")
    free = here.free_bytes()
    yield _device(here)
    yield Finding(name="cores", text=f"{count_cores()} of {os.cpu_count()}")
    short = f"The demo needs {format_bytes(DEMO_MEMORY)} of memory, and {format_bytes(free)} is free."
    where = "memory" if here.kind == "cpu" else "device memory"
    text = f"{format_bytes(free)} free of {format_bytes(here.memory_bytes)}"
    yield Finding(name=where, text=text, lacks=short if free < DEMO_MEMORY else None)
    yield _disk()
    rates = measure(here)
    yield Finding(
        name="matmul",
        text=f"float32 {rates.float32:,.1f}, bfloat16 {rates.bfloat16:,.1f} GFLOP/s; "
        f"--dtype {rates.dtype} is the one to use here",
    )
    yield from _kernels(here, kernels)
    if model is not None:
        yield from _model(model, here, free)


def _device(here: "Platform") -> Finding:
    text = f"{here.kind}: {here.name}"
    nodes = list_accelerators()
    if here.kind == "cpu" and nodes:
        mend = "install a CUDA or ROCm build of torch" if get_torch_build() is None else "check the driver"
        text += f"; {nodes[0]} is there, but torch cannot use it: {mend}"
    return Finding(name="device", text=text)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    lacks = (
        f"The demo writes up to {format_bytes(DEMO_DISK)}, and {format_bytes(free)} is free here."
        if free < DEMO_DISK
        else None
    )
    if not os.access(Path.cwd(), os.W_OK):
        lacks = f"{Path.cwd()} cannot be written to; change to a folder of your own."
    return Finding(name="disk", text=f"{format_bytes(free)} free in {Path.cwd()}", lacks=lacks)


def measure(here: "Platform") -> Rates:
    """Time small matrix products; a fraction of a second, so orders of magnitude only."""
    import torch

    def rate(dtype: torch.dtype) -> float:
        best = 0.0
        size = 128
        started = time.perf_counter()
        while time.perf_counter() - started < 0.2:
            a = torch.randn(size, size, device=here.device).to(dtype)
            torch.mm(a, a)  # the first of a size may set up threads and kernels
            here.synchronize()
            before = time.perf_counter()
            torch.mm(a, a)
            here.synchronize()
            seconds = time.perf_counter() - before
            best = max(best, 2 * size**3 / seconds / 1e9)
            if seconds < 2e-3 and size < 4096:
                size *= 2
        return best

    return Rates(float32=rate(torch.float32), bfloat16=rate(torch.bfloat16))


def _why_no_kernels() -> str | None:
    """The end of a sentence that says why device code cannot be tried; a torch that is absent is reported as that."""
    if _version("torch") is None:
        return None
    from miles.cluster import platform
    from miles.kernels.runtime.triton_compat import HAVE_TRITON

    if platform.detect_platform("auto").kind == "cpu":
        return "tries device code on an accelerator, and torch sees none here; leave it out."
    return None if HAVE_TRITON else f"tries device code, which {_TRITON}, or leave it out."


def _kernels(here: "Platform", asked: bool) -> Iterator[Finding]:
    """On an accelerator, what is known of the engine's device code there."""
    if here.kind == "cpu":
        return
    from miles.kernels.runtime.triton_compat import HAVE_TRITON

    if not HAVE_TRITON:
        yield Finding(name="kernels", text=f"none: device code {_TRITON}; until then the engine is plain torch")
    elif not asked:
        yield Finding(name="kernels", text="not tried; miles doctor --kernels holds each against torch on this GPU")
    else:
        import torch

        from miles.kernels.runtime.selftest import run_selftest

        yield Finding(name="kernels", text="compiling each for this GPU, and trying it, may take a few minutes ...")
        dtypes = (torch.bfloat16, torch.float32)
        yield from summarize_selftest([outcome for dtype in dtypes for outcome in run_selftest(here.device, dtype)])


def summarize_selftest(outcomes: "Sequence[SelfTestResult]") -> Iterator[Finding]:
    """A line for each precision, and one for each kernel that cannot be trusted, with the way around it."""
    sound = {outcome.name for outcome in outcomes if outcome.has_passed and outcome.dtype == "float32"}
    for dtype in dict.fromkeys(outcome.dtype for outcome in outcomes):
        tried = [outcome for outcome in outcomes if outcome.dtype == dtype]
        agree = [outcome for outcome in tried if outcome.has_passed]
        text = f"{dtype}: {len(agree)} of {len(tried)} agree with torch on this GPU"
        if agree:
            worst = max(agree, key=lambda outcome: outcome.tolerance_ratio)
            text += f" (worst: {worst.name} {worst.relative_error:.1e})"
        yield Finding(name="kernels", text=text)
        for outcome in (outcome for outcome in tried if not outcome.has_passed):
            off = f"{outcome.relative_error:.1e} off, where {outcome.tolerance:.1e} is rounding"
            text = f"{outcome.name} in {dtype}: {outcome.error or off}"
            around = "--rollout-dtype float32" if outcome.name in sound else "--rollout-backend sglang, or --device cpu"
            mend = f"Until that is mended, sample with {around}; and please report it with these lines."
            yield Finding(name="kernels", text=text, lacks=f"{text.rstrip('.')}. {mend}")


def _unknown(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """An architecture without a family: what it takes, and the ways there are."""
    named = (config.get("architectures") or [config.get("model_type")])[0]
    found = list(list_mechanisms(config))
    missing = [f"{one.name} ({one.key})" for one in found if not one.supported]
    here = [one.name for one in found if one.supported]
    yield Finding(name="model", text=f"{named}, which no family here reads")
    yield Finding(name="has", text=f"a decoder, {', '.join(here)}" if here else "a decoder; its config names no more")
    yield Finding(
        name="lacks", text=", ".join(missing) or "nothing its config names: a family file may be all it takes"
    )
    if is_known_to_transformers(str(config.get("model_type"))):
        way = "train it as it is with --model-impl transformers (slower)"
    else:
        way = f"the installed transformers {_version('transformers')} does not support it either: a newer one may"
    lacks = f"{folder}: {named} has no family here; {way}, or add one as docs/add_a_model.md shows."
    yield Finding(name="ways", text=f"{way}; or add a family (docs/add_a_model.md)", lacks=lacks)


def _model(folder: Path, here: "Platform", free: int) -> Iterator[Finding]:
    try:
        config = read_config(folder)
        if match_family(config) is None:
            yield from _unknown(folder, config)
            return
        spec = spec_from_config(config)
        stored = stored_tensors(folder)
    except MilesError as error:
        yield Finding(name="model", text=f"{folder} cannot be used", lacks=f"{folder}: {error}")
        return
    experts = "" if spec.moe is None else f", {active_parameter_count(spec) / 1e6:,.2f}M for each token"
    yield Finding(name="model", text=f"{spec.family}, {parameter_count(spec) / 1e6:,.2f}M parameters{experts}")
    dtypes = ", ".join(sorted({tensor.dtype for tensor in stored.values()}))
    wrong = _wrong_tensors(spec, stored, config, folder)
    text = f"{len(stored)} in {len({tensor.file for tensor in stored.values()})} files, {dtypes}"
    yield Finding(name="tensors", text=text, lacks=f"{folder}: {wrong}" if wrong else None)
    dtype = "float32" if here.kind == "cpu" else "bfloat16"
    weights = weight_bytes(spec, dtype)
    training = weights + gradient_bytes(spec, dtype) + optimizer_bytes(spec, dtype)
    room = max(0, free - weights) // kv_bytes_per_token(spec, dtype, FAST)
    fits = f"and {room:,} tokens of cache beside them" if weights < free else "which do NOT fit"
    yield Finding(name="to chat", text=f"{format_bytes(weights)} of {dtype} weights, {fits}")
    lacks = f"Training {folder} takes {format_bytes(training)} and more, and {format_bytes(free)} is free."
    yield Finding(
        name="to train",
        text=f"{format_bytes(training)} of weights, gradients and optimizer; activations come on top",
        lacks=lacks if training > free else None,
    )


def _wrong_tensors(
    spec: DecoderSpec, stored: Mapping[str, StoredTensor], config: Mapping[str, Any], folder: Path
) -> str | None:
    """What of the checkpoint's tensors is not as its config says."""
    try:
        locate_tensors(spec, stored, read_quant_config(config), folder)
    except MilesError as error:
        return str(error)
    return None
