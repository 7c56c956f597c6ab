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
    tokens, why = kv_tokens(config, plan, spec)
    return (
        *trained,
        Share(name="engine", bytes=0 if shared else weights, note="reads the same" if shared else "a copy of its own"),
        Share(name="kv cache", bytes=tokens * kv_bytes_per_token(spec, dtype), note=f"{tokens:,} tokens: {why}"),
        *_states(config, plan, spec),
    )


def _critic(config: Config, plan: Plan) -> tuple[Share, ...]:
    """A second model in training; its output weight, where it is one of its own, is held and not trained."""
    spec = None if plan.critic is None else spec_or_none(str(plan.critic), config.models.model_impl)
    if spec is None:
        return ()
    idle = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    head, whole = spec.hidden_size + 1, parameter_count(spec)
    trained = (whole - idle) / whole

    def held(of_all: int, each: int) -> int:
        return round(of_all * trained) + head * each

    dtype = plan.dtype
    return (
        Share(name="critic", bytes=weight_bytes(spec, dtype) + 4 * head, note=f"{dtype}, from {plan.critic}"),
        Share(name="critic grad", bytes=held(gradient_bytes(spec, dtype), 4), note="float32"),
        Share(name="critic adam", bytes=held(optimizer_bytes(spec, dtype), 8), note="its own optimizer"),
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
    most = running * (-(-spec.max_positions // page) * page)
    why = f"{running} requests of {spec.max_positions:,} positions"
    if plan.device != "cpu":
        return most, f"{why} at most; the engine takes no more than half of what is free"
    free = free_memory()
    half = most if free is None else free // 2 // max(1, kv_bytes_per_token(spec, plan.dtype))
    return (most, why) if most <= half else (half, "half of the free memory")


def sized(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
