"""Options of LoRA adapters that a server applies beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraServingConfig:
    """Which adapters are served, and the room for them."""

    enable_lora: bool = option(
        False, "Serve LoRA adapters beside the weights: requests choose one by lora_path, or as model=BASE:ADAPTER."
    )
    lora_paths: tuple[str, ...] = option(
        (), "Adapters to load at start, as NAME=FOLDER or FOLDER, in PEFT's format; implies --enable-lora."
    )
    max_loras_per_batch: int = option(
        8, "Adapters that may run at once: slots in device memory.", unit="adapters", ge=1, le=1024
    )
    max_loaded_loras: int | None = option(
        None,
        "Adapters kept in host memory, at least --max-loras-per-batch; those used least recently are read from their "
        "folders again when needed. By default all are kept.",
        unit="adapters",
        ge=1,
    )
    max_lora_rank: int | None = option(
        None,
        "The largest rank of an adapter, which device memory is reserved for; by default that of --lora-paths, or 64.",
        unit="N",
        ge=1,
        le=512,
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "Projections that adapters may target: names such as q_proj or lm_head, experts for the routed ones, "
        "all for attention and dense MLPs; by default all, and lm_head and experts that --lora-paths target.",
    )

    @property
    def is_enabled(self) -> bool:
        """Whether requests may choose adapters."""
        return self.enable_lora or bool(self.lora_paths)
