"""Flags of upstream that this version does not have, each with what to say of it: see ``retired.tsv``."""

from functools import cache
from pathlib import Path

_WHOSE = {
    "megatron": "belongs to Megatron, whose own flags are given as --megatron-... under --train-backend megatron",
    "shape": "describes the model, which the checkpoint's own config.json does here",
    "sglang": "belongs to the SGLang backend, which this version does not have",
    "router": "belongs to the SGLang router, which this version does not have",
    "miles": "is not in this version",
}
_PREFIXES = {"--sglang-": "sglang", "--eval-sglang-": "sglang", "--router-": "router", "--sglang-router-": "router"}


def explain(flag: str) -> str | None:
    """The end of a sentence that starts with ``flag``; None when nothing is known of it."""
    whose, mend = retired().get(flag, (_by_prefix(flag), ""))
    return f"{_WHOSE[whose]}; {mend or 'leave it out'}" if whose else None


@cache
def retired() -> dict[str, tuple[str | None, str]]:
    """Flag -> (whose it is, what to do instead)."""
    table: dict[str, tuple[str | None, str]] = {}
    for line in Path(__file__).with_name("retired.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            flag, whose, *mend = line.split("\t")
            table[flag] = (whose, mend[0] if mend else "")
    return table


def _by_prefix(flag: str) -> str | None:
    matches = [prefix for prefix in _PREFIXES if flag.startswith(prefix)]
    return _PREFIXES[max(matches, key=len)] if matches else None
