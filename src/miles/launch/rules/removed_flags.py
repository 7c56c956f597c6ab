"""Flags of upstream and of other frameworks: what each is called here, or that its feature is not supported.

``removed_flags.tsv`` has upstream's flags, each of a kind below; ``flag_synonyms.tsv`` the names of TRL, verl and
others.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

_LOGGING = "; use --use-tensorboard, or read metrics.jsonl in the run directory"
_SENTENCES: dict[str, Callable[[str, str], str]] = {
    "megatron": lambda flag, _: (
        f"is a field of Megatron's config; write --megatron-{flag[2:]} (--train-backend megatron)"
    ),
    "shape": lambda _, __: "describes the model, which the checkpoint's own config.json does here; remove it",
    "same": lambda _, text: f"is not needed: {text}; remove it",
    "speed": lambda _, __: "chooses how upstream computes, not what; remove it",
    "use": lambda _, text: f"is not a flag here; {text}",
    "missing": lambda _, text: "asks for {}, which is not supported{}{}".format(*text.partition(";")),
    "router": lambda _, __: "is an option of the router, which is a command of its own: see miles route --help",
    "synonym": lambda _, text: f"is called {text} here",
}
"""Kind of a removed flag -> the end of the sentence, from the flag and its text."""

_PREFIXES = {
    "--eval-sglang-": ("missing", "other options of SGLang for evaluation"),
    "--prometheus-": ("missing", f"metrics for Prometheus{_LOGGING}"),
    "--router-": ("router", ""),
    "--sglang-router-": ("router", ""),
    "--trackio-": ("missing", f"logging to Trackio{_LOGGING}"),
    "--vllm-": ("missing", "vLLM; engines are --rollout-backend native, served or sglang"),
}


def explain_removed_flag(flag: str) -> str | None:
    """The end of a sentence that starts with ``flag``; None for flags that are not known."""
    found = load_removed_flags().get(flag) or _find_synonym(flag) or _find_by_prefix(flag)
    return None if found is None else _SENTENCES[found[0]](flag, found[1])


@cache
def load_removed_flags() -> dict[str, tuple[str, str]]:
    """Upstream's flag -> (kind, text)."""
    return {flag: (kind, text[0] if text else "") for flag, kind, *text in _read_table("removed_flags.tsv")}


@cache
def load_flag_synonyms() -> dict[str, str]:
    """The name of an option in another framework -> our flag."""
    return {row[0]: row[1] for row in _read_table("flag_synonyms.tsv")}


def _read_table(name: str) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def _find_synonym(flag: str) -> tuple[str, str] | None:
    """By its name, or the end of a dotted one such as ``actor_rollout_ref.actor.optim.lr``."""
    name = flag.lstrip("-").replace("-", "_").lower()
    while name:
        if (ours := load_flag_synonyms().get(name)) is not None:
            return "synonym", ours
        name = name.partition(".")[2]
    return None


def _find_by_prefix(flag: str) -> tuple[str, str] | None:
    return next((found for prefix, found in _PREFIXES.items() if flag.startswith(prefix)), None)
