"""Offload of the optimizer state while engines sample on the trainer's device: whether, and why. No torch.

    engine starts    KV cache, a fraction of what the weights leave free
    trainer starts   master weights
    first step       the engine sleeps; moments, gradients and activations come
    from then on     the engine wakes beside weights, masters and moments, or beside the weights alone

The run, ``miles plan`` and the fit of recipes decide by the product's memory, so that they and all ranks agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from miles.launch.config import Config
from miles.launch.plan.memory import MemoryShare, estimate_kv_tokens, estimate_memory
from miles.launch.plan.plan import Plan
from miles.launch.plan.running_requests import count_running_requests
from miles.models.spec import DecoderSpec

USABLE = 0.9
"""Share of a GPU's memory that is planned with; the rest is the driver's, the collectives' and fragmentation."""
CACHES = ("kv cache", "draft kv cache", "states")
ENGINE_SHARES = ("engine", *CACHES, "images", "CUDA graphs", "engine draft")
OPTIMIZER_SHARES = ("optimizer", "critic adam", "draft adam")
STEP_SHARES = ("activations", "gathered", "critic gathered", "vision tower", "draft activations")
"""What exists only within a step of the trainer."""
_GRADIENT_SHARES = ("gradients", "critic grad", "draft grad")
# Without knowledge of what else is on the device: the part of the usable memory up to which the optimizer stays.
_SMALL = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadChoice:
    """Whether the trainer's state is offloaded while engines sample. ``is_automatic`` where no option says so.

    ``optimizer`` are its bytes; ``sampling`` those on the fullest device while engines sample if nothing is offloaded,
    None where that is not known.
    """

    offloads: bool
    why: str
    is_automatic: bool = False
    optimizer: int = 0
    sampling: int | None = None


def choose_offload(config: Config, plan: Plan, spec: DecoderSpec, memory: int | None) -> OffloadChoice:
    """Choose for devices with ``memory`` bytes; None where that is not known yet."""
    train = config.train
    if plan.device == "cpu" or plan.lease != "colocated" or config.observe.debug_rollout_only:
        return OffloadChoice(offloads=False, why="the device is not handed over")
    if config.parallel.fsdp_cpu_offload:  # FSDP keeps it there, and cannot train where it is moved to the device
        return OffloadChoice(offloads=False, why="--fsdp-cpu-offload has it on the host at all times")
    if train.offload_train is not None:
        flag = "--offload-train" if train.offload_train else "--no-offload-train"
        return OffloadChoice(offloads=train.offload_train, why=flag)
    if train.offload:
        return OffloadChoice(offloads=True, why="--offload")
    if memory is None:
        return OffloadChoice(offloads=True, why="the memory of the device is not known")
    shares, usable = estimate_memory(config, plan, spec), int(memory * USABLE)
    optimizer = add_shares(shares, OPTIMIZER_SHARES)
    is_foreign = config.sglang.rollout_backend == "sglang" or bool(config.sglang.rollout_external_engine_addrs)
    if is_foreign or plan.num_policies > 1 or not plan.samples:  # then what else is there is not planned here
        return OffloadChoice(
            offloads=optimizer > usable * _SMALL,
            why=f"it has {_format_gb(optimizer)} of {_format_gb(usable)}, and an eighth may stay beside unknown memory",
            is_automatic=True,
            optimizer=optimizer,
        )
    sampling = _estimate_sampling(config, plan, spec, shares, memory)
    verdict = "of" if sampling <= usable else "which is more than"
    return OffloadChoice(
        offloads=sampling > usable,
        why=f"with it {_format_gb(sampling)} would be held, {verdict} the {_format_gb(usable)} that are usable",
        is_automatic=True,
        optimizer=optimizer,
        sampling=sampling,
    )


def add_shares(shares: Sequence[MemoryShare], names: Collection[str]) -> int:
    """Return the bytes of the shares of these names."""
    return sum(share.bytes for share in shares if share.name in names)


def _estimate_sampling(
    config: Config, plan: Plan, spec: DecoderSpec, shares: Sequence[MemoryShare], memory: int
) -> int:
    """Bytes on the device while engines sample beside the whole state of the trainer."""
    freed = set(STEP_SHARES)
    # Megatron's gradient buffers stay, and Muon's momenta come one by one, between gradients and activations.
    if config.train.train_backend != "megatron" and config.train.optimizer != "muon":
        freed |= {*_GRADIENT_SHARES}
    kept = sum(share.bytes for share in shares if share.name not in (*freed, "kv cache", "draft kv cache"))
    return kept + _estimate_kv_cache(config, plan, spec, shares, memory)


def _estimate_kv_cache(
    config: Config, plan: Plan, spec: DecoderSpec, shares: Sequence[MemoryShare], memory: int
) -> int:
    """Bytes of the KV cache by the engine's rule; it starts before the optimizer exists."""
    planned = add_shares(shares, ("kv cache", "draft kv cache"))
    if config.native.engine_kv_tokens is not None:
        return planned
    tokens, _ = estimate_kv_tokens(config, plan, spec)
    page = config.native.engine_page_size
    needed = (
        planned
        * count_running_requests(config, plan.device, spec)
        * (-(-spec.max_positions // page) * page)
        // max(1, tokens)
    )
    weights = add_shares(shares, ("weights",)) if plan.transport == "shared" else 0
    free = int((memory - weights) * config.native.engine_memory_fraction)
    return max(0, min(needed, free - add_shares(shares, ("images", "states"))))


def _format_gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
