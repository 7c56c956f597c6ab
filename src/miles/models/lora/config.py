"""Options of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Whether LoRA adapters are trained in place of the weights, and on which modules."""

    lora_rank: int = option(
        0,
        "Rank of the LoRA adapters that are trained in place of the weights; 0 trains the weights, or the "
        "adapters of --lora-adapter-path at their own rank.",
        unit="N",
        ge=0,
    )
    lora_alpha: float | None = option(
        None,
        "LoRA alpha: an adapter's product is scaled by alpha over rank; 16 by default, or that of --lora-adapter-path.",
        gt=0,
    )
    lora_dropout: float = option(
        0.0,
        "Probability with which inputs of the LoRA adapters are dropped in training forwards; log-probs that are "
        "compared or kept are computed without.",
        ge=0,
        lt=1,
    )
    use_rslora: bool = option(False, "Scale LoRA products by alpha over the square root of the rank (rsLoRA).")
    use_dora: bool = option(False, "Also train the magnitude of every output of the adapted projections (DoRA).")
    target_modules: str | None = option(
        None,
        "Projections with adapters, comma-separated: attn, mlp, experts, lm_head, names like q_proj, "
        "wildcards, a regular expression, vision (.attn, .mlp, .projector); default all-linear: attn, mlp.",
    )
    exclude_modules: str | None = option(None, "Projections to exclude from --target-modules, comma-separated.")
    lora_merge: bool = option(
        True,
        "Merge LoRA adapters into the weights that trainer and engine compute with; --no-lora-merge applies them "
        "beside the weights, which are in memory once then, as with --train-precision.",
    )
    lora_versions: int = option(
        0,
        "Versions of unmerged adapters that an engine of ours holds by name, 2 or more: requests may name one, and "
        "those in flight end with theirs; 0 holds one, which updates replace.",
        unit="N",
        ge=0,
        le=64,
    )
    experts_shared_outer_loras: bool = option(
        False,
        "Let all experts of a layer share the LoRA factors at its input (A of gate and up) and output (B of down).",
    )
    lora_adapter_path: str | None = option(
        None, "Folder or hub name of a PEFT adapter to start from, instead of a new one.", path=True, hub="model"
    )

    @property
    def is_enabled(self) -> bool:
        """Whether adapters are trained, not the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
