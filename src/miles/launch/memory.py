"""The memory plan: what a run will hold on its device, from the model's spec alone."""

from dataclasses import dataclass

from miles.launch.config import Config
from miles.launch.plan import Plan
from miles.models.footprint import gradient_bytes, kv_bytes_per_token, optimizer_bytes, weight_bytes
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One tenant of the device's memory."""

    name: str
    bytes: int
    note: str


def shares_of(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[Share, ...]:
    """Everything whose size is known beforehand; activations are not, and come on top."""
    dtype = plan.dtype
    masters = "two moments" if dtype == "float32" else "two moments and float32 masters"
    reference = weight_bytes(spec, dtype) if plan.reference is not None else 0
    tokens, why = kv_tokens(config, plan, spec)
    weights, shared = weight_bytes(spec, dtype), plan.transport == "shared"
    return (
        Share(name="weights", bytes=weights, note=dtype),
        Share(name="engine", bytes=0 if shared else weights, note="reads the same" if shared else "a copy of its own"),
        Share(name="gradients", bytes=gradient_bytes(spec, dtype), note=dtype),
        Share(name="optimizer", bytes=optimizer_bytes(spec, dtype), note=f"Adam: {masters}"),
        Share(
            name="reference", bytes=reference, note=str(plan.reference) if plan.reference else "no KL term asks for it"
        ),
        Share(name="kv cache", bytes=tokens * kv_bytes_per_token(spec, dtype), note=f"{tokens:,} tokens: {why}"),
    )


def kv_tokens(config: Config, plan: Plan, spec: DecoderSpec) -> tuple[int, str]:
    """How many tokens the engine's cache holds, and why so many."""
    if config.native.engine_kv_tokens is not None:
        return config.native.engine_kv_tokens, "--engine-kv-tokens"
    r = config.rollout
    running = min(config.native.engine_max_running, plan.tickets * r.n_samples_per_prompt)
    known = r.rollout_max_prompt_len is not None or r.rollout_max_context_len is not None
    length = (r.rollout_max_prompt_len or 0) + r.rollout_max_response_len if r.rollout_max_prompt_len else None
    whole = min(x for x in (length, r.rollout_max_context_len, spec.max_positions) if x is not None)
    if not known:
        whole = min(whole, r.rollout_max_response_len)
    page = config.native.engine_page_size
    whole = -(-whole // page) * page
    plus = "" if known else ", prompts not counted (--rollout-max-prompt-len is not set)"
    return running * whole, f"{running} requests of {whole} at most, or half the free memory{plus}"


def sized(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
