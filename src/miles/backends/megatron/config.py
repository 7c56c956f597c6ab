"""Options of the Megatron backend: Megatron-Core's own flags, passed through."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import passthrough


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Fields of Megatron-Core's config besides those that follow from the checkpoint and the parallel layout."""

    megatron_flags: tuple[str, ...] = passthrough(
        "megatron", "Fields of Megatron-Core's own TransformerConfig, such as --megatron-recompute-granularity full."
    )


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
