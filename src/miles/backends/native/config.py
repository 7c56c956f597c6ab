"""Knobs of the embedded engine."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """How much the engine takes on at once, and what it remembers."""

    engine_max_running: int = knob(256, "Requests the embedded engine computes at the same time.", unit="requests")
    engine_page_size: int = knob(16, "Tokens in one page of the key-value cache.", unit="tokens")
    engine_kv_tokens: int | None = knob(
        None,
        "Tokens the key-value cache holds; without it, all that running requests can need, as far as memory allows.",
        unit="tokens",
    )
    engine_memory_fraction: float = knob(
        0.5, "Part of the memory, free when the engine is made, that its key-value cache may take."
    )
    engine_prefill_chunk: int | None = knob(
        None,
        "Prompt tokens in one engine step at most, beside a token of every running request; without it 2,048 on a CPU, "
        "on an accelerator 8,192, or 16,384 under a billion active parameters.",
        unit="tokens",
    )
    engine_prefill_patience: int = knob(
        8,
        "Recorded steps that prompts wait for one another at most, where 32 requests or more run; 0 lets none wait.",
        unit="steps",
    )
    engine_prefix_cache: bool = knob(
        True, "Compute a prefix that several requests share only once.", off="--disable-engine-prefix-cache"
    )
    engine_record_routing: bool = knob(
        True,
        "Return the experts every sampled token went to, which a trainer can replay.",
        off="--disable-engine-record-routing",
    )
    engine_graphs: bool = knob(
        True,
        "Record the steps that draw one token for everyone, and replay them; on accelerators only.",
        off="--disable-engine-graphs",
    )
