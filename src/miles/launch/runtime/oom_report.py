"""Out-of-memory report: who held how much GPU or host memory when an allocation failed, and which flags would help."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles.cluster.oom_kill import OOM_KILLED
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.plan.hardware import get_free_memory
from miles.launch.plan.layout_memory import get_recompute_mode
from miles.launch.plan.memory import MemoryShare, estimate_memory, format_bytes
from miles.launch.plan.plan import Plan
from miles.launch.rules.paths import read_spec_or_none

# What torch says on a CPU, where it raises a plain RuntimeError.
_CPU_MESSAGE = "can't allocate memory"
_GPU_MESSAGE = "out of memory"
_MIN_SHARE = 0.02
# Advice that a resumed run refuses, since it changes what is learned.
_FIXED_FLAGS = ("--optimizer-state-dtype", "--lora-rank")


class OutOfMemoryError(MilesError):
    """An allocation that failed, with a report of who held the memory."""


@contextmanager
def report_out_of_memory(config: Config, plan: Plan) -> Iterator[None]:
    """Turn an allocation that failed anywhere in the run into an error with the report."""
    try:
        yield
    except Exception as error:
        cause = find_allocation_failure(error)
        if cause is None or isinstance(error, OutOfMemoryError):
            raise
        raise OutOfMemoryError("\n".join(_format_report(config, plan, cause))) from error


def find_allocation_failure(error: BaseException) -> BaseException | None:
    """The error of a failed allocation among ``error``, its causes and the members of exception groups."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        text = str(each).lower()
        by_type = isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError"
        by_text = any(message in text for message in (_CPU_MESSAGE, _GPU_MESSAGE, OOM_KILLED))
        if by_type or (isinstance(each, RuntimeError | MilesError) and by_text):
            return each
        waiting += [one for one in (each.__cause__, each.__context__) if one is not None]
        waiting += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return None


def _format_report(config: Config, plan: Plan, cause: BaseException) -> Iterator[str]:
    on_gpu = plan.device != "cpu" and not isinstance(cause, MemoryError) and OOM_KILLED not in str(cause)
    yield f"the {'GPU' if on_gpu else 'host'} ran out of memory: {_first_sentence(cause)}"
    spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    shares = () if spec is None else estimate_memory(config, plan, spec)
    total = sum(share.bytes for share in shares)
    if total:
        yield f"Planned for {'each GPU' if on_gpu else 'this host'} ({format_bytes(total)} in all):"
        for share in sorted(shares, key=lambda share: -share.bytes):
            if share.bytes:
                yield f"  {format_bytes(share.bytes).rjust(10)}  {share.name.ljust(11)}  {share.note}"
    yield from _measure_gpu() if on_gpu else _measure_host()
    advice = list(advise(config, plan, shares, total))
    if advice:
        yield "What would help: " + "; ".join(advice) + "."
    fixed = [flag for flag in _FIXED_FLAGS if any(flag in text for text in advice)]
    yield (
        "Nothing was lost: the same command resumes the run, and these flags may be added"
        + (f" ({' and '.join(fixed)} only in a new run)." if fixed else ".")
    )


def _first_sentence(cause: BaseException) -> str:
    text = " ".join(str(cause).split()) or type(cause).__name__
    return text.partition(". ")[0].rstrip(".") + "."


def _measure_gpu() -> Iterator[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    free, size = torch.cuda.mem_get_info()
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    cached = torch.cuda.memory_reserved() - held
    yield (
        f"Measured in this process: {format_bytes(held)} in tensors (peak {format_bytes(peak)}), "
        f"{format_bytes(cached)} cached by torch; {format_bytes(free)} of {format_bytes(size)} free on the GPU, "
        f"{format_bytes(max(0, size - free - held - cached))} held by CUDA and other processes."
    )


def _measure_host() -> Iterator[str]:
    free = get_free_memory()
    resident = _read_resident_bytes()
    if free is not None and resident is not None:
        yield f"Measured: this process holds {format_bytes(resident)}, and {format_bytes(free)} is free on the host."


def _read_resident_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)


def advise(config: Config, plan: Plan, shares: tuple[MemoryShare, ...], total: int) -> Iterator[str]:
    """Flags that would lower the planned memory, those that save most first."""
    sizes = {share.name: share.bytes for share in shares if share.bytes >= _MIN_SHARE * total}
    train, tokens = config.train, config.train.max_tokens_per_gpu
    advice: list[tuple[int, str]] = []

    def add(name: str, text: str) -> None:
        if name in sizes:
            advice.append((sizes[name], text))

    if get_recompute_mode(train) == "none":
        add("activations", "--gradient-checkpointing")
    add("activations", f"--max-tokens-per-gpu {max(1, tokens // 2)} (now {tokens})")
    if train.max_patches_per_gpu is not None:
        add(
            "vision tower",
            f"--max-patches-per-gpu {max(1, train.max_patches_per_gpu // 2)} (now {train.max_patches_per_gpu})",
        )
        add("vision tower", "--freeze-vision-tower")
    if plan.device != "cpu" and not train.optimizer_cpu_offload:
        add("optimizer", "--optimizer-cpu-offload")
    if train.optimizer_state_dtype == "float32":
        add("optimizer", "--optimizer-state-dtype bfloat16")
    if plan.device != "cpu" and not config.parallel.fsdp_cpu_offload and plan.layout.world > 1:
        add("weights", "--fsdp-cpu-offload")
    if config.lora.lora_rank is None:
        add("gradients", "--lora-rank 16 instead of full training")
    if plan.layout.world == 1:
        add("weights", "more GPUs (--actor-num-gpus-per-node)")
    add("images", f"--engine-vision-cache-mib below {config.native.engine_vision_cache_mib}")
    add("kv cache", f"--engine-memory-fraction below {config.native.engine_memory_fraction:g}, or --engine-kv-tokens")
    yield from (text for _, text in sorted(advice, key=lambda item: -item[0]))
