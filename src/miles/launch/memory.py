"""The memory plan: what a run will hold on its device, from the model's spec alone."""

from dataclasses import dataclass

from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.machine import free_memory
from miles.launch.plan import Plan
from miles.models.footprint import (
    BYTES,
    gradient_bytes,
    kv_bytes_per_token,
    optimizer_bytes,
    parameter_count,
    state_bytes_per_sequence,
    weight_bytes,
)
from miles.models.retained import activation_bytes
from miles.models.shard import spec_of_rank
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One tenant of the device's memory."""

    name: str
    bytes: int
    note: str


def shares_of(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Share, ...]:
    """Everything a run holds at its widest, as far as the spec tells."""
    dtype = plan.dtype
    masters = "two moments" if dtype == "float32" else "two moments and float32 masters"
    reference = weight_bytes(spec, dtype) if plan.reference is not None else 0
    weights, shared = weight_bytes(spec, dtype), plan.transport == "shared"
    trained = (
        Share(name="weights", bytes=weights, note=dtype),
        Share(name="gradients", bytes=gradient_bytes(spec, dtype), note="float32"),
        Share(name="optimizer", bytes=optimizer_bytes(spec, dtype), note=f"Adam: {masters}"),
        Share(name="reference", bytes=reference, note=str(plan.reference) if plan.reference else "nothing asks for it"),
    )
    trained += (*_critic(config, plan), *_teachers(config, plan), _activations(config, plan, spec))
    if not plan.samples:
        return trained
    world = config.cluster.rollout_num_gpus_per_engine
    held, note = (0, "reads the same") if shared else (weights, "a copy of its own")
    if world > 1:
        spec = spec_of_rank(spec, world)
        held, note = weight_bytes(spec, dtype), f"a copy of its part, one of {world}"
    tokens, why = kv_tokens(config, plan, spec)
    return (
        *trained,
        Share(name="engine", bytes=held, note=note),
        Share(name="kv cache", bytes=tokens * kv_bytes_per_token(spec, dtype), note=f"{tokens:,} tokens: {why}"),
        *_states(config, plan, spec),
    )


def _critic(config: Config, plan: Plan) -> tuple[Share, ...]:
    """A second model in training; on a device of its own it takes nothing of this one's memory."""
    spec = None if plan.critic is None else spec_or_none(str(plan.critic), config.models.model_impl)
    if spec is None:
        return ()
    dtype, elsewhere = plan.dtype, config.train.critic_device
    if elsewhere not in ("auto", plan.device):
        return (Share(name="critic", bytes=0, note=f"on {elsewhere}, a device of its own, from {plan.critic}"),)
    weights, gradients, optimizer = critic_bytes(spec, dtype)
    return (
        Share(name="critic", bytes=weights, note=f"{dtype}, from {plan.critic}"),
        Share(name="critic grad", bytes=gradients, note="float32"),
        Share(name="critic adam", bytes=optimizer, note="its own optimizer"),
    )


def critic_bytes(spec: DecoderSpec, dtype: str) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of a critic; its output weight, if its own, is held and not trained."""
    idle = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    head, whole = spec.hidden_size + 1, parameter_count(spec)
    trained = (whole - idle) / whole

    def held(of_all: int, each: int) -> int:
        return round(of_all * trained) + head * each

    return (
        weight_bytes(spec, dtype) + 4 * head,
        held(gradient_bytes(spec, dtype), 4),
        held(optimizer_bytes(spec, dtype), 8),
    )


def _teachers(config: Config, plan: Plan) -> tuple[Share, ...]:
    """Frozen models that score what the policy wrote, all held together."""
    found = {name: spec_or_none(str(folder), config.models.model_impl) for name, folder in plan.teachers.items()}
    held = sum(weight_bytes(spec, plan.dtype) for spec in found.values() if spec is not None)
    note = ", ".join(f"{name}: {plan.teachers[name]}" for name in found)
    return (Share(name="teacher", bytes=held, note=f"{plan.dtype}, {note}"),) if found else ()


def _activations(config: Config, plan: Plan, spec: DecoderSpec) -> Share:
    """What a training step keeps for its backward pass; no step has more tokens than its whole batch."""
    again = config.train.gradient_checkpointing
    tokens = config.train.max_tokens_per_gpu
    longest = config.rollout.rollout_max_context_len or spec.max_positions
    tokens = min(tokens, plan.global_batch_size * longest)
    held = activation_bytes(spec, tokens, size=BYTES[plan.dtype], fused=plan.device != "cpu", checkpointing=again)
    note = f"{tokens:,} tokens at once" + (", layers recomputed" if again else "")
    return Share(name="activations", bytes=held, note=note)


def _states(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Share, ...]:
    """The states of recurrent layers, one for each request that may run."""
    each = state_bytes_per_sequence(spec, plan.dtype)
    running = config.native.engine_max_running
    return (Share(name="states", bytes=each * running, note=f"of {running} requests"),) if each else ()


def kv_tokens(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[int, str]:
    """How many tokens the engine's cache holds, and why so many; the engine's own rule, as far as it is known here."""
    if config.native.engine_kv_tokens is not None:
        return config.native.engine_kv_tokens, "--engine-kv-tokens"
    page, running = config.native.engine_page_size, config.native.engine_max_running
    part = config.native.engine_memory_fraction
    most = running * (-(-spec.max_positions // page) * page)
    why = f"{running} requests of {spec.max_positions:,} positions"
    if plan.device != "cpu":
        return most, f"{why} at most; the engine takes no more than {part:.0%} of what is free"
    free = free_memory()
    fits = most if free is None else int(free * part) // max(1, kv_bytes_per_token(spec, plan.dtype))
    return (most, why) if most <= fits else (fits, f"{part:.0%} of the free memory")


def sized(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
