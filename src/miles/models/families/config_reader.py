"""Reader of Hugging Face configs: typed keys, transformers' defaults, and errors for what is not implemented."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.rope_config import RopeConfigReader, write_rope_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

# transformers' own default, for configs that name no base.
_THETA = 10_000.0


class ConfigReader:
    """Reads one config. Problems are collected and raised together by ``build_spec``."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family
        self.problems: list[str] = []

    def reject(self, key: str, why: str) -> None:
        problem = f"{key} of config.json {why} ({self.family})."
        if problem not in self.problems:  # a key may be read more than once
            self.problems.append(problem)

    def build_spec(self, common: Mapping[str, Any], layers: Iterable[LayerSpec], **own: Any) -> DecoderSpec:
        """The decoder with the arguments of ``common_args`` and the family's ``own``; raises all problems."""
        if self.problems:
            raise UsageError(self.problems)
        return DecoderSpec(**common, layers=tuple(layers), **own)

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Read a positive integer; without a default the key is required."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.reject(key, f"is {value!r}, but must be a positive integer")
            return 1
        return value

    def number(self, key: str, default: float) -> float:
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.reject(key, f"is {value!r}, but must be a number")
            return default
        return float(value)

    def optional_positive(self, key: str, default: float | None = None) -> float | None:
        """Read a number above 0; null is None."""
        value = self.config.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.reject(key, f"is {value!r}, but must be a number above 0")
            return None
        return None if value is None else float(value)

    def layer_index(self, key: str, default: int) -> int:
        """Read a layer index: an integer from 0 on."""
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.reject(key, f"is {value!r}, but must be an integer from 0 on")
            return default
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.reject(key, f"is {value!r}, but must be true or false")
            return default
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Reject any value except the implemented ones (the first is the default)."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            self.reject(key, f"is {value!r}, but only {' or '.join(map(repr, allowed))} is implemented")

    def eos_token_ids(self) -> tuple[int, ...]:
        value = self.config.get("eos_token_id")
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(value)

    def rope(
        self,
        *,
        layer_type: str | None = None,
        head_dim: int | None = None,
        interleaved: bool = False,
        theta: float = _THETA,
        partial: float = 1.0,
        aliases: Mapping[str, str] | None = None,
        mrope: tuple[int, int, int] | None = None,
        mrope_interleaved: bool = False,
    ) -> RopeSpec:
        """Read the RoPE parameters: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` as in older configs.

        If they are given per layer type, ``layer_type`` selects one. ``head_dim`` is for families that may rotate only
        part of a head; ``theta`` and ``partial`` are the family's defaults for the base and the rotated fraction;
        ``aliases`` translates rope types that only this family uses. ``mrope`` are the sections of multimodal RoPE of a
        config that does not name them.
        """
        key, given = self.rope_group(layer_type)
        part = given.get("partial_rotary_factor", self.config.get("partial_rotary_factor", partial))
        channels, rope_dim = self._rotated_channels(part, head_dim)
        rotary = RopeConfigReader(given, report=lambda why: self.reject(key, why))
        base = self.number("rope_theta", theta) if self.config.get("rope_theta") is not None else theta
        longest = self.config.get("max_position_embeddings")
        # An invalid length is rejected where it is read.
        longest = longest if isinstance(longest, int) and longest > 1 else 2
        read = rotary.read(base, dim=channels, longest=longest, aliases=aliases)
        if mrope is None:
            return replace(read, dim=rope_dim, interleaved=interleaved)
        section = rotary.mrope_section(mrope, channels)
        return replace(
            read, dim=rope_dim, interleaved=interleaved, mrope_section=section, mrope_interleaved=mrope_interleaved
        )

    def rope_group(self, layer_type: str | None = None) -> tuple[str, Mapping[str, Any]]:
        """Return the key and the group of RoPE parameters of a layer type as written in the config."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        given: Mapping[str, Any] = self.config.get(key) or {}
        if not isinstance(given, Mapping):
            self.reject(key, f"is {given!r}, but must be a group of parameters")
            return key, {}
        if any(isinstance(value, Mapping) for value in given.values()):
            if layer_type is None:
                self.reject(key, "differs by layer type, which is not implemented")
                return key, {}
            return key, given.get(layer_type) or {}
        # An older place for the same value, which transformers prefers.
        original = self.config.get("original_max_position_embeddings")
        return key, given if original is None else {**given, "original_max_position_embeddings": original}

    def _rotated_channels(self, part: Any, head_dim: int | None) -> tuple[int, int | None]:
        """Return how many channels of a head are rotated, and the ``dim`` of a RopeSpec that says so."""
        # Invalid sizes are rejected where they are read.
        heads, hidden = self.config.get("num_attention_heads"), self.config.get("hidden_size")
        full_dim = head_dim or self.config.get("head_dim")
        if full_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            full_dim = hidden // heads
        full_dim = full_dim if isinstance(full_dim, int) and full_dim > 1 else 2
        if isinstance(part, int | float) and part == 1:
            return full_dim, None
        if head_dim is None:
            self.reject("partial_rotary_factor", "rotates only part of a head, which is not implemented")
        elif not isinstance(part, int | float) or not 0 < part < 1 or int(head_dim * part) % 2 or head_dim * part < 2:
            self.reject("partial_rotary_factor", f"is {part!r}, but must rotate an even number of a head's channels")
        else:
            return int(head_dim * part), int(head_dim * part)
        return full_dim, None

    def layer_types(self, default: Callable[[int], str], *allowed: str) -> tuple[str, ...]:
        """Read each layer's type: from ``layer_types``, else by its index; rejects types that are not ``allowed``."""
        count, kinds = self.positive_int("num_hidden_layers"), self.config.get("layer_types")
        if kinds is None:
            return tuple(default(i) for i in range(count))
        if len(kinds) != count:
            self.reject("layer_types", f"names {len(kinds)} layers, but there are {count}")
            return (allowed[0],) * count
        for kind in sorted(set(kinds) - set(allowed)):
            self.reject("layer_types", f"has a layer of kind {kind!r}, which is not implemented")
        return tuple(kinds)

    def sliding_windows(
        self,
        *,
        first: int = 0,
        always: bool = False,
        default: int | None = None,
        sliding: Callable[[int], bool] | None = None,
    ) -> tuple[int | None, ...]:
        """Read each layer's sliding window: from ``layer_types``, else for layers from ``first`` on if windows are
        enabled.

        ``always`` is for families without ``use_sliding_window``; ``default`` is the window of a config without the
        key; ``sliding`` replaces the rule for which layers have a window.
        """
        used = always or self.flag("use_sliding_window")
        window = self.config.get("sliding_window", default) if used else None
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            self.reject("sliding_window", f"is {window!r}, but must be a positive integer")
            window = 1
        has = sliding or (lambda i: i >= first)
        named = ("full_attention", "sliding_attention")
        kinds = self.layer_types(lambda i: named[window is not None and has(i)], *named)
        if window is None and "sliding_attention" in kinds:
            key, what = ("sliding_window", "missing") if used else ("use_sliding_window", "false")
            self.reject(key, f"is {what}, but layer_types asks for sliding windows")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def attention_heads(self, *, head_dim: int | None = None) -> dict[str, Any]:
        """Read ``num_heads``, ``num_kv_heads`` and ``head_dim`` of an AttentionSpec; ``head_dim`` is the family's
        default.
        """
        hidden, heads = self.positive_int("hidden_size"), self.positive_int("num_attention_heads")
        kv_heads = self.positive_int("num_key_value_heads", heads)
        size = self.positive_int("head_dim", head_dim or max(1, hidden // heads))
        sound = not self.problems  # no follow-up errors about keys that were already rejected
        if sound and heads % kv_heads:
            self.reject("num_key_value_heads", f"is {kv_heads}, which does not divide the {heads} attention heads")
        if sound and size % 2:
            self.reject("head_dim", f"is {size}, but RoPE needs an even number")
        # Rejected values are replaced by valid ones so that the rest of the config can be checked too.
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
        return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size + size % 2}

    def expert_counts(self, *keys: str, per_token: Sequence[str] = ("num_experts_per_tok",)) -> dict[str, Any]:
        """Read ``num_experts`` (from the first of ``keys`` that is present) and ``experts_per_token`` (from the first
        of ``per_token``) of a MoeSpec.
        """
        key, each_key = (
            next((k for k in names if self.config.get(k) is not None), names[0]) for names in (keys, per_token)
        )
        total, each = self.positive_int(key), self.positive_int(each_key)
        if each > total and not self.problems:
            self.reject(each_key, f"is {each}, more than the {total} experts")
        return {"num_experts": total, "experts_per_token": each}

    def sparse_step_layers(self) -> tuple[bool, ...]:
        """Read which layers have experts from ``decoder_sparse_step`` and ``mlp_only_layers``."""
        dense = frozenset(self.config.get("mlp_only_layers") or ())
        step, count = self.positive_int("decoder_sparse_step", 1), self.positive_int("num_hidden_layers")
        return tuple(i not in dense and (i + 1) % step == 0 for i in range(count))

    def common_args(self, *, eps: float = 1e-6, tied: bool = False) -> dict[str, Any]:
        """Read the DecoderSpec arguments common to all families; ``eps`` and ``tied`` are the family's defaults."""
        self.require("attention_dropout", 0.0, None)
        return {
            "family": self.family,
            "vocab_size": self.positive_int("vocab_size"),
            "hidden_size": self.positive_int("hidden_size"),
            "norm_eps": self.number("rms_norm_eps", eps),
            "tie_embeddings": self.flag("tie_word_embeddings", tied),
            "max_positions": self.positive_int("max_position_embeddings"),
            "eos_token_ids": self.eos_token_ids(),
        }


def write_common_config(spec: DecoderSpec) -> dict[str, Any]:
    """Write the config keys common to families of softmax attention layers; RoPE in both the new and the old form."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
    sizes = [layer.ffn.size for layer in spec.layers if isinstance(layer.ffn, MlpSpec)]
    rope = write_rope_config(mixer.rope)
    ends = spec.eos_token_ids
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": sizes[0] if sizes else 4 * spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "rope_theta": mixer.rope.theta,
        "rope_scaling": None if mixer.rope.kind == "default" else rope,
        "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_positions,
        "eos_token_id": (ends[0] if len(ends) == 1 else list(ends)) if ends else None,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }


def write_window_config(spec: DecoderSpec) -> dict[str, Any]:
    """Write the sliding-window keys of a config."""
    windows = [layer.mixer.window for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": next(window for window in windows if window),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
