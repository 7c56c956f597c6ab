"""What the families' configs have in common: reading a key with its type, and refusing what is not implemented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.spec import DecoderSpec, RopeSpec

# transformers' own default, for configs that name no base.
_THETA = 10_000.0
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Fields:
    """One config being read. Complaints gather and are raised together by ``settle``."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family
        self.problems: list[str] = []

    def refuse(self, key: str, why: str) -> None:
        self.problems.append(f"{key} of config.json {why} ({self.family}).")

    def settle(self) -> None:
        if self.problems:
            raise UsageError(self.problems)

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a default the key must be there."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, f"is {value!r}, but must be a positive integer")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"is {value!r}, but must be a number")
            return default
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"is {value!r}, but must be true or false")
            return default
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but the implemented ones (the first is the default)."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            self.refuse(key, f"is {value!r}, but only {' or '.join(map(repr, allowed))} is implemented")

    def ends(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id")
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)

    def rope(self) -> RopeSpec:
        """Rotary settings: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as older configs write them."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        given: Mapping[str, Any] = self.config.get(key) or {}
        theta = given.get("rope_theta", self.config.get("rope_theta", _THETA))
        kind = given.get("rope_type", given.get("type", "default"))
        if given.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0)) != 1.0:
            self.refuse("partial_rotary_factor", "turns only part of a head, which is not implemented")
        if any(isinstance(value, Mapping) for value in given.values()):
            self.refuse(key, "differs by layer type, which is not implemented")
            return RopeSpec(theta=_THETA)
        if kind == "default":
            return RopeSpec(theta=float(theta))
        if kind not in ("linear", "llama3"):
            self.refuse(key, f"asks for rope type {kind!r}, but only default, linear and llama3 are implemented")
            return RopeSpec(theta=float(theta))
        missing = [name for name in (_LLAMA3 if kind == "llama3" else _LLAMA3[:1]) if given.get(name) is None]
        if missing:
            self.refuse(key, f"lacks {', '.join(missing)}, which rope type {kind} needs")
            return RopeSpec(theta=float(theta))
        if kind == "linear":
            return RopeSpec(theta=float(theta), kind="linear", factor=float(given["factor"]))
        return RopeSpec(
            theta=float(theta),
            kind="llama3",
            factor=float(given["factor"]),
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_max_positions=int(given["original_max_position_embeddings"]),
        )

    def full_attention(self, first_windowed: int) -> None:
        """Refuse a sliding window that some layer would use; ``first_windowed`` is where the family starts using it."""
        kinds = self.config.get("layer_types")
        if kinds and any(kind != "full_attention" for kind in kinds):
            self.refuse("layer_types", "has layers that are not full_attention, which is not implemented")
        windowed = self.config.get("use_sliding_window") and self.config.get("sliding_window") is not None
        if windowed and not kinds and first_windowed < self.config.get("num_hidden_layers", 0):
            self.refuse("use_sliding_window", "is true, but a sliding window is not implemented")

    def common(self, *, head_dim: int | None = None, first_windowed: int | None = None) -> dict[str, Any]:
        """The arguments of a DecoderSpec that all families read alike."""
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        size = self.whole("head_dim", head_dim or max(1, hidden // heads))
        sound = not self.problems  # a derived complaint about a key already refused would only confuse
        if sound and heads % kv_heads:
            self.refuse("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
        if sound and size % 2:
            self.refuse("head_dim", f"is {size}, but rotary positions need an even one")
        self.only("hidden_act", "silu")
        self.only("attention_dropout", 0.0, None)
        self.only("quantization_config", None)
        if first_windowed is not None:
            self.full_attention(first_windowed)
        return {
            "family": self.family,
            "vocab_size": self.whole("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.whole("intermediate_size"),
            "num_layers": self.whole("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": size,
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "rope": self.rope(),
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "max_positions": self.whole("max_position_embeddings"),
            "eos_token_ids": self.ends(),
        }


def written(spec: DecoderSpec) -> dict[str, Any]:
    """The part of a config that all families write alike; rope both the new way and the old."""
    rope: dict[str, Any] = {"rope_type": spec.rope.kind, "rope_theta": spec.rope.theta}
    if spec.rope.kind != "default":
        rope["factor"] = spec.rope.factor
    if spec.rope.kind == "llama3":
        rope["low_freq_factor"] = spec.rope.low_freq_factor
        rope["high_freq_factor"] = spec.rope.high_freq_factor
        rope["original_max_position_embeddings"] = spec.rope.original_max_positions
    ends = spec.eos_token_ids
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "rope_theta": spec.rope.theta,
        "rope_scaling": None if spec.rope.kind == "default" else rope,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_positions,
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
