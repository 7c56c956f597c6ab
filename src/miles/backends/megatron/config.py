"""Knobs of the Megatron trainer: its own flags, delivered unopened."""

from dataclasses import dataclass

from miles.config.knob import mail


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """What Megatron-Core is told beside what the checkpoint and the layout say."""

    megatron_flags: tuple[str, ...] = mail(
        "megatron", "Fields of Megatron-Core's own TransformerConfig, such as --megatron-recompute-granularity full."
    )
