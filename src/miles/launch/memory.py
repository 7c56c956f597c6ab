"""The memory plan: what a run will hold on its device, from the model's spec alone."""

from dataclasses import dataclass, replace

from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.layout_memory import (
    activations_by_rank,
    adapted_by_rank,
    frozen_by_rank,
    held_by_rank,
    recompute_of,
)
from miles.launch.lora import lora_of
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
from miles.models.lora_targets import Lora
from miles.models.shard import spec_of_rank
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One tenant of the device's memory."""

    name: str
    bytes: int
    note: str


def shares_of(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Share, ...]:
    """Everything a run holds at its widest on the fullest device, as far as the spec tells."""
    dtype = plan.dtype
    reference = frozen_by_rank(spec, plan.layout, dtype) if plan.reference is not None else 0
    weights, shared = weight_bytes(spec, dtype), plan.transport == "shared"
    trained = (
        *_trained(config, plan, spec),
        Share(name="reference", bytes=reference, note=str(plan.reference) if plan.reference else "nothing asks for it"),
    )
    trained += (*_critic(config, plan), *_teachers(config, plan), _activations(config, plan, spec))
    if config.observe.debug_rollout_only:
        trained = (Share(name="weights", bytes=weights, note=f"{dtype}: nothing is trained"),)
    if not plan.samples:
        return trained
    world = config.cluster.rollout_num_gpus_per_engine
    if config.models.rollout_dtype != "auto":
        dtype = config.models.rollout_dtype
        weights = weight_bytes(spec, dtype)
    held, note = (0, "reads the same") if shared else (weights, "a copy of its own")
    if plan.transport == "served" and world == 1 and (lora := lora_of(config.lora, spec)) is not None:
        held, note = held + lora.covered * BYTES[dtype], "a copy of its own, and the base that adapters are added to"
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


def _trained(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Share, ...]:
    """The policy in training: this rank's part of it, where ranks share one."""
    if (lora := lora_of(config.lora, spec)) is not None:
        return _adapted(config, plan, spec, lora)
    dtype, layout, train = plan.dtype, plan.layout, config.train
    held = held_by_rank(spec, layout, dtype, moments=train.optimizer_state_dtype, optimizer=train.optimizer)
    cut = layout.pieces * layout.tensor * layout.pipeline
    part = "" if layout.world == 1 else f", one of {layout.world} ranks' parts, cut {cut} ways"
    apart = layout.pieces * layout.replicate > 1
    kind = "momenta and moments" if train.optimizer == "muon" else "two moments"
    masters = kind if apart or dtype == "float32" else f"{kind} and float32 masters"
    form = "" if train.optimizer_state_dtype == "float32" else f" in {train.optimizer_state_dtype}"
    note = f"{train.optimizer.capitalize()}: {masters}{form}"
    there = plan.device != "cpu"
    host = there and config.parallel.fsdp_cpu_offload
    shares = (
        _on(host, Share(name="weights", bytes=held.weights, note=("float32" if apart else dtype) + part)),
        _on(host, Share(name="gradients", bytes=held.gradients, note="float32")),
        _on(host or (there and train.optimizer_cpu_offload), Share(name="optimizer", bytes=held.optimizer, note=note)),
    )
    if not held.gathered:
        return shares
    told = f"{dtype}: embedding, head, and a layer at a time with its gradients"
    return (*shares, Share(name="gathered", bytes=held.gathered, note=told))


def _adapted(config: Config, plan: Plan, spec: DecoderSpec, lora: Lora) -> tuple[Share, ...]:
    """The policy where adapters of it are trained: every rank has all of these, and its part of the rest."""
    dtype, layout, train = plan.dtype, plan.layout, config.train
    held = adapted_by_rank(spec, layout, dtype, lora, moments=train.optimizer_state_dtype)
    part = "" if layout.world == 1 else f", one of {layout.pieces} ranks' parts"
    form = "" if train.optimizer_state_dtype == "float32" else f" in {train.optimizer_state_dtype}"
    away = plan.device != "cpu" and train.optimizer_cpu_offload
    shares = (
        Share(name="weights", bytes=held.weights, note=f"{dtype}, adapters in them{part}"),
        Share(name="base", bytes=held.base, note=f"{dtype}: the matrices that adapters are added to, without them"),
        Share(name="adapters", bytes=held.adapters, note=f"float32: {lora.parameters:,} numbers of rank {lora.rank}"),
        Share(name="gradients", bytes=held.gradients, note="float32, of adapters alone"),
        _on(away, Share(name="optimizer", bytes=held.optimizer, note=f"Adam: two moments of adapters{form}")),
    )
    if not held.gathered:
        return shares
    return (
        *shares,
        Share(name="gathered", bytes=held.gathered, note=f"{dtype}: embedding, head, and a layer at a time"),
    )


def _on(host: bool, share: Share) -> Share:
    """The same, or where the host holds it nothing of the device's memory."""
    return replace(share, bytes=0, note=f"{share.note}, {sized(share.bytes)} of the host's memory") if host else share


def _critic(config: Config, plan: Plan) -> tuple[Share, ...]:
    """A second model in training; on a device of its own it takes nothing of this one's memory."""
    spec = None if plan.critic is None else spec_or_none(str(plan.critic), config.models.model_impl)
    if spec is None:
        return ()
    dtype, elsewhere = plan.dtype, config.train.critic_device
    if elsewhere not in ("auto", plan.device):
        return (Share(name="critic", bytes=0, note=f"on {elsewhere}, a device of its own, from {plan.critic}"),)
    weights, gradients, optimizer = (round(whole / _ways(plan)) for whole in critic_bytes(spec, dtype))
    return (
        Share(name="critic", bytes=weights, note=f"{dtype}, from {plan.critic}"),
        Share(name="critic grad", bytes=gradients, note="float32"),
        Share(name="critic adam", bytes=optimizer, note="its own optimizer"),
    )


def _ways(plan: Plan) -> int:
    """Over how many ranks a model is cut in all."""
    return plan.layout.pieces * plan.layout.tensor * plan.layout.pipeline


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
    held = sum(frozen_by_rank(spec, plan.layout, plan.dtype) for spec in found.values() if spec is not None)
    note = ", ".join(f"{name}: {plan.teachers[name]}" for name in found)
    return (Share(name="teacher", bytes=held, note=f"{plan.dtype}, {note}"),) if found else ()


def _activations(config: Config, plan: Plan, spec: DecoderSpec) -> Share:
    """What a training step keeps for its backward pass; no step has more tokens than its whole batch."""
    tokens = config.train.max_tokens_per_gpu * plan.layout.context
    longest = config.rollout.rollout_max_context_len or spec.max_positions
    tokens = min(tokens, plan.global_batch_size * longest)
    fused = plan.device != "cpu"
    held = activations_by_rank(spec, plan.layout, plan.dtype, tokens, config.train, fused=fused)
    again = {"none": "", "full": ", layers recomputed", "selective": ", all but products and attention recomputed"}
    note = f"{tokens:,} tokens at once" + again[recompute_of(config.train)]
    if plan.layout.context > 1:
        note += f", over {plan.layout.context} context ranks"
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
