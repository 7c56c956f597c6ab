"""The knobs of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Whether the weights themselves are trained or small factors that are added to them, and to which."""

    lora_rank: int = knob(
        0,
        "Rank of the adapters that are trained while the weights stay as they are; 0 trains the weights, or the "
        "adapters of --lora-adapter-path at their own rank.",
        unit="N",
    )
    lora_alpha: float | None = knob(
        None,
        "What an adapter's product is multiplied with, over its rank; 16 when not given, or what --lora-adapter-path "
        "says.",
    )
    lora_dropout: float = knob(
        0.0,
        "Upstream's share of an adapter's inputs that is left out in training; 0 alone, as adapters here are part of "
        "the weights.",
    )
    target_modules: str | None = knob(
        None,
        "Which projections have adapters, between commas: attn, mlp, or names as the checkpoint has them, such as "
        "q_proj; all-linear, the default, is attn and mlp.",
    )
    exclude_modules: str | None = knob(None, "Which of --target-modules have none after all, between commas.")
    lora_adapter_path: str | None = knob(
        None, "Folder of an adapter in PEFT's format to start from, instead of a new one.", path=True
    )

    @property
    def asked(self) -> bool:
        """Whether adapters are trained, and not the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
