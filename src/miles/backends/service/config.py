"""Options of the training service."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Whether a server trains adapters, for whom, and how much at once."""

    train: bool = option(
        False, "Serve training, too: several tenants train and sample LoRA adapters over the Tinker API."
    )
    service_directory: str = option(
        "runs/service", "Folder of the training service: its journal, adapters and checkpoints.", path=True
    )
    service_tenants: str | None = option(
        None,
        "A TOML file with a table [tenants.NAME] for each tenant: its key, and quotas that differ from the defaults.",
        path=True,
    )
    service_batch_tokens: int = option(
        16384,
        "Most tokens of a pass over the data of all tenants; a longer datum is computed alone.",
        unit="tokens",
        ge=1,
    )
    service_quantum: int = option(
        4096, "Tokens of a tenant's turn while others wait: smaller is fairer, larger makes larger passes.", ge=1
    )
    service_coalesce_seconds: float = option(
        0.005,
        "How long an idle trainer waits for the requests of other tenants before it starts a pass.",
        unit="seconds",
        ge=0,
        aliases=("--multi-lora-max-coalesce-wait-s",),
    )
    service_max_adapters: int = option(
        16, "Adapters that one tenant may have in training.", ge=1, aliases=("--multi-lora-n-adapters",)
    )
    service_max_resident: int = option(
        64, "Adapters in training that stay in device memory; those used least recently are moved to disk.", ge=1
    )
    service_max_queued: int = option(256, "Requests of one tenant that may wait or run at once.", ge=1)
    service_max_stored_gib: float = option(64.0, "Checkpoints that one tenant may store.", unit="GiB", gt=0)
    service_max_rank: int = option(128, "The largest rank of an adapter.", ge=1, le=512)
    service_lora_alpha: float = option(
        32.0, "LoRA alpha of all adapters: their products are scaled by alpha over rank.", gt=0
    )
    service_sampler_versions: int = option(
        16, "Versions of an adapter that samplers without a name can use; older ones are removed.", ge=1
    )
    service_session_seconds: float = option(
        1800.0,
        "How long the adapters of a session stay in training after the last sign of its client.",
        unit="seconds",
        gt=0,
    )
    service_snapshot_mib: int = option(
        256, "Size of the journal beyond which adapters are saved and it is shortened.", unit="MiB", ge=1
    )
    service_gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward passes of the training service, to save memory."
    )

    @property
    def has_keys(self) -> bool:
        """Whether every tenant has a key of its own."""
        return self.train and self.service_tenants is not None
