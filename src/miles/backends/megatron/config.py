"""Options of the Megatron backend: Megatron-Core's own flags, passed through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles.config.option import passthrough


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Fields of Megatron-Core's config besides those that follow from the checkpoint and the parallel layout."""

    megatron_flags: tuple[str, ...] = passthrough(
        "megatron", "Fields of Megatron-Core's own TransformerConfig, such as --megatron-recompute-granularity full."
    )


# Flags about where weights, activations and optimizer states are.
_LAYOUT_FLAGS = frozenset(
    (
        "use_distributed_optimizer",
        "virtual_pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_in_first_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "num_layers_in_last_pipeline_stage",
        "decoder_last_pipeline_num_layers",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    )
)


def drop_layout_flags(words: Sequence[str]) -> tuple[str, ...]:
    """Return Megatron's flags without those that change no result, which a resumed run may change.

    >>> drop_layout_flags(["--recompute-modules", "core_attn", "mlp", "--moe-z-loss-coeff", "1e-3"])
    ('--moe-z-loss-coeff', '1e-3')
    """
    kept: list[str] = []
    is_kept = True
    for word in words:
        if word.startswith("--"):
            is_kept = word[2:].partition("=")[0].replace("-", "_") not in _LAYOUT_FLAGS
        if is_kept:
            kept.append(word)
    return tuple(kept)


def build_recompute_flags(mode: Literal["none", "full", "selective"], layers: int | None) -> tuple[str, ...]:
    """Activation recomputation as Megatron's flags: of the first ``layers`` layers of a pipeline stage, or of all.

    >>> build_recompute_flags("full", 4)
    ('--recompute-granularity', 'full', '--recompute-method', 'block', '--recompute-num-layers', '4')
    """
    if mode == "none":
        return ()
    if mode == "selective":
        return ("--recompute-granularity", mode)
    method, count = ("uniform", 1) if layers is None else ("block", layers)
    return ("--recompute-granularity", mode, "--recompute-method", method, "--recompute-num-layers", str(count))
